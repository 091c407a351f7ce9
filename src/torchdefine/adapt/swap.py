"""New modules for one table: the stand-in, its shared places and its output layers, ready to be put in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from torchdefine.adapt.stand_in import HeadKind, MapHead, SharedStandIn, StandIn, VectorsHead
from torchdefine.adapt.survey import Place, Table
from torchdefine.embedding import DeFINE, DeFINEBag, DefineUnit, StandardMap, UnitConfig, VocabularyFacts, make_plan
from torchdefine.embedding.features import check_features, concatenated_width, strings_of
from torchdefine.embedding.unit_plan import default_expand_dim, default_map_dim
from torchdefine.errors import UserError
from torchdefine.tables import CompactTable


@dataclass(frozen=True)
class Swap:
    """A table, and the new modules for its places and its output layers."""

    old: Table
    new: tuple[nn.Module, ...]
    initial_rms: float | None = None
    """The root mean square that the vectors of a fresh table start with."""

    def __iter__(self) -> Iterator[tuple[Place, nn.Module]]:
        return zip((*self.old.places, *self.old.heads), self.new, strict=True)

    def put_in(self) -> None:
        for place, new in self:
            setattr(place.parent, place.attribute, new)

    def take_out(self) -> None:
        for place, _ in self:
            setattr(place.parent, place.attribute, place.module)


def fresh_define(
    old: Table,
    map_dim: int | None,
    expand_dim: int | None,
    depth: int | None,
    unit: UnitConfig | str,
    features: Sequence[str] = (),
    tokens: Sequence[str] | None = None,
) -> DeFINE:
    """A new DeFINE of a table's sizes, with the usual widths where none are given.

    ``tokens`` are the strings that ``features`` may need.
    """
    check_features(features, "a model that calls its table with ids alone", pairs=False)
    weight = old.module.weight
    rows, width = weight.shape
    unit = UnitConfig.of(unit, depth=depth)
    map_dim = default_map_dim(width) if map_dim is None else map_dim
    expand_dim = default_expand_dim(map_dim, width, unit) if expand_dim is None else expand_dim
    config = UnitConfig.of(unit, embedding_dim=width, expand_dim=expand_dim)
    make_plan(map_dim + concatenated_width(features), config)  # refuses sizes that do not fit before memory is taken
    facts = VocabularyFacts(rows, None, strings_of(tokens, features, rows))
    with weight.device:
        table = StandardMap(rows, map_dim, old.module.padding_idx, sparse=old.module.sparse)
        made = DeFINE.over(table, unit=config, features=features, vocabulary=facts)
        if made.features is not None:
            made.features.sparse = old.module.sparse
    return made.to(weight.dtype)


def swap_of(
    old: Table, made: nn.Module, kind: HeadKind, *, fresh: bool, scales: Mapping[str, float] | None = None
) -> Swap:
    """The swap of a table for ``made``; a ``fresh`` one starts with numbers as large as the old.

    ``scales`` says what places multiply their vectors by; of others it is found by trying.
    """
    weight, factors, size = old.module.weight, old.scales(scales), None
    fresh = fresh and not weight.is_meta
    if isinstance(made, CompactTable):
        made.mean.data = made.mean.data.to(weight.dtype)  # this sets the dtype of its vectors
    if fresh and isinstance(made, DeFINE):
        if not bool(torch.isfinite(weight).all()):
            raise UserError(f"The table {old.name} has values that are not finite: repair it before replacing it.")
        size = float(weight.detach().float().square().mean().sqrt()) or 1.0  # a table of zeros has none
        _start_as_large(made, size, tied=kind == "map" and bool(old.heads))
    if isinstance(old.module, nn.EmbeddingBag):
        new: list[nn.Module] = [DeFINEBag(made, cast(Any, old.module.mode), old.module.include_last_offset)]
    else:
        stand_in = StandIn(made, old.module, factors[0], kind)
        new = [stand_in, *(SharedStandIn(stand_in, factor) for factor in factors[1:])]
        new += [_head(place.module, stand_in, kind, fresh) for place in old.heads]
    swap = Swap(old, tuple(new), size)
    for place, module in swap:
        module.train(place.module.training)
    return swap


def _start_as_large(made: DeFINE, size: float, *, tied: bool) -> None:
    """Start vectors as large as the old ones, and the map's table too if an output layer shares it.

    Logits then begin as large as the old with a head that does not rescale. A table of ones and a tiny head would give
    the same logits, but Adam moves all numbers equally far: the head would change too much and the table hardly at all.
    The unit sees a root mean square of 1 either way: by its weights and not by the map's ``scale``, which a state
    dictionary does not hold.
    """
    assert isinstance(made.unit, DefineUnit)
    made.unit.rescale_output(size)
    if tied:
        std = size * (made.embedding_dim / made.map_dim) ** 0.5
        made.map.reset_parameters(std=std)
        made.unit.rescale_input(1 / std)
        if made.features is not None:
            made.features.reset_parameters(std)  # the weights see what stands beside the map's vectors, too


def _head(old: nn.Module, stand_in: StandIn, kind: HeadKind, fresh: bool) -> nn.Module:
    assert isinstance(old, nn.Linear)
    bias = old.bias  # the same parameter, since the model may share it too
    if kind == "map":
        return MapHead(stand_in, bias, fresh=fresh)
    if kind == "vectors":
        return VectorsHead(stand_in, bias)
    own = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
    own.weight = nn.Parameter(old.weight.detach().clone(), requires_grad=old.weight.requires_grad)
    own.bias = bias
    return own
