"""New modules for one table: the stand-in, its shared places and its output layers, ready to be put in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdefine.adapt.heads import MapHead, VectorsHead
from torchdefine.adapt.stand_in import HeadKind, SharedStandIn, StandIn
from torchdefine.adapt.survey import Place, Table, lookup_scale
from torchdefine.embedding import DeFINE, DefineUnit, UnitConfig
from torchdefine.embedding.plan import LARGEST_DEFAULT_GROUPS
from torchdefine.errors import UserError
from torchdefine.tables import CompactTable

TIMES_THE_WIDTH = 4
"""The paper's smallest model: vectors 256 wide, k = 1024. Its larger ones keep that k."""
WIDEST = 1024
WIDEST_MAP = 128
"""The paper's n for vectors 512 wide. A map that is not much narrower than the vectors saves nothing."""
_MULTIPLE = 2 * LARGEST_DEFAULT_GROUPS  # half of it, as in residual layers, still divides into equal groups


@dataclass(frozen=True)
class Swap:
    """One module that takes the place of another."""

    place: Place
    new: nn.Module


def fresh_define(
    old: Table, map_dim: int | None, expand_dim: int | None, depth: int | None, unit: UnitConfig | str
) -> DeFINE:
    """A new DeFINE of a table's sizes, with the usual widths where none are given."""
    weight, padding_idx = old.module.weight, old.module.padding_idx
    rows, width = weight.shape
    unit = UnitConfig.of(unit, depth=depth)
    if map_dim is None:
        map_dim = map_dim_for(width)
    if expand_dim is None:
        expand_dim = expand_dim_for(map_dim, width, unit)
    with weight.device:
        made = DeFINE(rows, width, map_dim, expand_dim, padding_idx=padding_idx, unit=unit)
    return made.to(weight.dtype)


def map_dim_for(embedding_dim: int) -> int:
    """A quarter of a table's width, at most 128; a multiple of 16."""
    quarter = -(-embedding_dim // (4 * LARGEST_DEFAULT_GROUPS)) * LARGEST_DEFAULT_GROUPS
    return min(quarter, WIDEST_MAP)


def expand_dim_for(map_dim: int, embedding_dim: int, config: UnitConfig) -> int:
    """The paper's k for a table: four times its width, at most 1024, at least ``map_dim``; a multiple of 32.

    A unit that does not reduce gives vectors as wide as its last layer, so there the table's width decides.
    """
    if not isinstance(map_dim, int):  # before it is used; other sizes are checked by make_plan
        raise TypeError(f"map_dim must be a whole number, not {map_dim!r}.")
    if not config.reduce:
        return 2 * embedding_dim if config.skip == "residual" else embedding_dim
    wanted = min(TIMES_THE_WIDTH * embedding_dim, WIDEST) // _MULTIPLE * _MULTIPLE
    smallest = -(-map_dim // _MULTIPLE) * _MULTIPLE
    return max(wanted, smallest)


def scales_of(old: Table, known: Mapping[str, float] | None = None) -> list[float]:
    """What each place multiplies its vectors by."""
    scales = []
    for place in old.places:
        assert isinstance(place.module, nn.Embedding)
        scale = known[place.name] if known and place.name in known else lookup_scale(place.module)
        if scale is None:
            kind = type(place.module).__name__
            if place.module.weight.is_meta:
                raise UserError(
                    f"The table {place.name} does more than nn.Embedding ({kind}), and the meta device does not tell "
                    "what: replace it where the model has its weights."
                )
            raise UserError(f"The table {place.name} does more than look rows up ({kind}), so it cannot be replaced.")
        scales.append(scale)
    return scales


def swaps_of(old: Table, made: nn.Module, kind: HeadKind, scales: Sequence[float], *, fresh: bool) -> list[Swap]:
    """All new modules for one table, ready to be put in. ``fresh`` ones start with numbers as large as the old."""
    weight = old.module.weight
    fresh = fresh and not weight.is_meta
    if isinstance(made, CompactTable):
        made.mean.data = made.mean.data.to(weight.dtype)  # this sets the dtype of its vectors
    if fresh and isinstance(made, DeFINE):
        if not bool(torch.isfinite(weight).all()):
            raise UserError(f"The table {old.name} has values that are not finite: repair it before replacing it.")
        _start_as_large(made, float(root_mean_square(weight)), tied=kind == "map" and bool(old.heads))
    stand_in = StandIn(made, weight, scales[0], kind).train(old.module.training)
    swaps = [Swap(old.places[0], stand_in)]
    swaps += [
        Swap(place, SharedStandIn(stand_in, scale).train(place.module.training))
        for place, scale in zip(old.places[1:], scales[1:], strict=True)
    ]
    for place in old.heads:
        assert isinstance(place.module, nn.Linear)
        swaps.append(Swap(place, _head(place.module, stand_in, kind, fresh).train(place.module.training)))
    return swaps


def _start_as_large(made: DeFINE, size: float, *, tied: bool) -> None:
    """Start vectors as large as the old ones, and the map's table too if an output layer shares it.

    Logits then begin as large as the old with a head that does not rescale. A table of ones and a tiny head would give
    the same logits, but Adam moves all numbers equally far: the head would change too much and the table hardly at all.
    """
    assert isinstance(made.unit, DefineUnit)
    with torch.no_grad():
        made.unit.last.weight.mul_(size)
    if tied and size:
        std = size * (made.embedding_dim / made.map_dim) ** 0.5
        made.map.reset_parameters(std=std)
        made.unit.rescale_input(1 / std)


def _head(old: nn.Linear, stand_in: StandIn, kind: HeadKind, fresh: bool) -> nn.Module:
    bias = old.bias  # the same parameter, since the model may share it too
    if kind == "map":
        return MapHead(stand_in, bias, fresh=fresh)
    if kind == "vectors":
        return VectorsHead(stand_in, bias)
    own = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
    own.weight = nn.Parameter(old.weight.detach().clone(), requires_grad=old.weight.requires_grad)
    own.bias = bias
    return own


def root_mean_square(weight: Tensor) -> Tensor:
    return weight.detach().float().square().mean().sqrt()


def put_in(swaps: Iterable[Swap]) -> None:
    for swap in swaps:
        setattr(swap.place.parent, swap.place.attribute, swap.new)
