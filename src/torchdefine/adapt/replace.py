"""Replace the embedding tables of any model, and put them back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from torchdefine.adapt.stand_in import Face, HeadKind, TiedHead
from torchdefine.adapt.survey import Table, Targets, choose
from torchdefine.adapt.swap import Swap, fresh_define, swap_of
from torchdefine.embedding import DeFINE, DeFINEBag, TokenEmbedding, UnitConfig
from torchdefine.errors import UserError
from torchdefine.tables import CompactTable, Rows

if TYPE_CHECKING:
    from torchdefine.adapt.huggingface import Adoption

Heads = Literal["tie", "finished", "untie"]


@dataclass(frozen=True)
class ReplacedTable:
    """The change of one table; a table that stood in several places counts once."""

    names: tuple[str, ...]
    heads: tuple[str, ...]
    rows: int
    width: int
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    initial_rms: float | None
    """The root mean square that fresh vectors start with: that of the old table, or 1 if it was all zeros."""
    untied: tuple[str, ...]
    """Layers of the table's shape that do not share it, as an untied output layer; they stay as they are."""
    packed: bool
    """Whether the new table has codes of a few bits. Then only bytes say how large it is."""

    def __str__(self) -> str:
        counts = f", {self.parameters_before:,} → {self.parameters_after:,} parameters"
        tied = f", tied output layer {', '.join(self.heads)}" if self.heads else ""
        size = "" if self.initial_rms is None else f", vectors start with a root mean square of {self.initial_rms:.2g}"
        line = (
            f"{', '.join(self.names)}: {self.rows:,} × {self.width}{'' if self.packed else counts}, "
            f"{self.bytes_before:,} → {self.bytes_after:,} bytes{tied}{size}"
        )
        stays = "as large as the old table and not tied to it, so it stays as it is"
        return "\n".join([line, *(f"{name}: {stays}" for name in self.untied)])


@dataclass(frozen=True, repr=False)
class ReplacementReport:
    """What ``replace_embeddings`` did, table by table, and what ``restore`` needs: it keeps the old tables alive."""

    tables: tuple[ReplacedTable, ...]
    parameters_before: int
    parameters_after: int
    """Of the whole model."""
    swaps: tuple[Swap, ...]
    adoptions: tuple[Adoption, ...]

    def to_dict(self) -> dict[str, Any]:
        whole = {"parameters_before": self.parameters_before, "parameters_after": self.parameters_after}
        return {**whole, "tables": [asdict(table) for table in self.tables]}

    def __str__(self) -> str:
        whole = f"whole model: {self.parameters_before:,} → {self.parameters_after:,} parameters"
        lines = [str(table) for table in self.tables]
        return "\n".join(lines if any(table.packed for table in self.tables) else [*lines, whole])

    __repr__ = __str__  # what a notebook shows


def replace_embeddings(
    model: nn.Module,
    targets: Targets = None,
    *,
    map_dim: int | None = None,
    expand_dim: int | None = None,
    depth: int | None = None,
    unit: UnitConfig | str = "define",
    features: Sequence[str] = (),
    tokens: Sequence[str] | None = None,
    table: nn.Module | Mapping[str, nn.Module] | None = None,
    heads: Heads = "tie",
) -> ReplacementReport:
    """Put DeFINE, or ``table``, where a model has its embedding tables; the model is changed in place.

    Everything is checked before anything is changed. Device, dtype, padding and training mode stay. Give the new
    parameters to the optimiser. A replacement that is larger than its table gives a warning. ``restore`` undoes it.

    Args:
        model: any module. One of transformers can be saved and loaded afterwards, as ``adapt.huggingface`` says.
        targets: which tables: a name or the end of one, a pattern ("encoder.*" or compiled), a type, or several of
            these. By default the token tables, if the model names them, or the only table.
        map_dim: of a fresh ``DeFINE``, whose vectors start as large as the old ones; by default a quarter of the
            table's width, at most 128.
        expand_dim: of its unit; by default four times the table's width, at most 1024.
        depth: of its unit.
        unit: its variant, by name or as settings.
        features: what a fresh ``DeFINE``'s tokens share beside its map, as in ``("characters:8192x16",)``; bigrams are
            refused, since a model calls its table without the token before.
        tokens: the string of each id, for features that read it.
        table: a table fitted to the old one instead (``CompactTable``, ``DeFINE``), or a mapping from names to such.
        heads: output layers that share a table are tied to the replacement ("tie": to DeFINE's map through a
            projection, or to the vectors of a given ``table``; "finished": to the vectors of a fresh DeFINE too), or
            keep the old matrix for themselves ("untie").
    """
    if heads not in get_args(Heads):
        raise UserError(f"heads is {heads!r}, but must be 'tie', 'finished' or 'untie'.")
    if isinstance(model, nn.Embedding | nn.EmbeddingBag):
        raise UserError("The model is itself a table, which cannot be replaced in place: use DeFINE(…) instead of it.")
    chosen, adoptions, fresh = choose(model, targets), _adoptions(model), table is None
    kind: HeadKind = "own" if heads == "untie" else "map" if fresh and heads == "tie" else "vectors"
    if table is None:
        new: list[nn.Module] = [fresh_define(old, map_dim, expand_dim, depth, unit, features, tokens) for old in chosen]
    else:
        new = _given(chosen, table)
    for made in new:
        if adoptions and not hasattr(made, "to_config"):
            what = f"A {type(made).__name__}"
            raise UserError(f"{what} cannot be saved with a model of transformers: give a CompactTable or DeFINE.")
    swaps = tuple(swap_of(old, made, kind, fresh=fresh) for old, made in zip(chosen, new, strict=True))
    reports = tuple(_reported(model, swap) for swap in swaps)
    for report, made in zip(reports, new, strict=True):  # before anything is changed, as a warning may be an error
        _warn_of_growth(report, made if fresh else None, untied=kind == "own")

    before = _numbers(model)
    for swap in swaps:
        swap.put_in()
    try:
        for adoption in adoptions:
            adoption.complete()
    except BaseException:
        _undo(swaps, adoptions)
        raise
    return ReplacementReport(reports, before, _numbers(model), swaps, tuple(adoptions))


def restore(model: nn.Module, report: ReplacementReport) -> None:
    """Undo ``replace_embeddings``: the old tables come back as they were, where the model is now."""
    parts, changes = set(map(id, model.modules())), [change for swap in report.swaps for change in swap]
    for place, new in changes:
        if getattr(place.parent, place.attribute, None) is not new:
            raise UserError(f"{place.name} has changed since it was replaced: undo what came later first.")
        if id(place.parent) not in parts:
            raise UserError("This report is of another model: give the one whose tables were replaced.")
    for place, new in changes:
        if isinstance(new, DeFINEBag):
            like: Any = next(new.parameters())
        else:
            like = new.stand_in.marker if isinstance(new, Face | TiedHead) else new.weight
        place.module.to(device=like.device, dtype=like.dtype).train(new.training)
    _undo(report.swaps, report.adoptions)


def _undo(swaps: Iterable[Swap], adoptions: Iterable[Adoption]) -> None:
    for swap in swaps:
        swap.take_out()
    for adoption in adoptions:
        adoption.undo()


def _given(chosen: Sequence[Table], given: nn.Module | Mapping[str, nn.Module]) -> list[nn.Module]:
    """The table that was given for each of the chosen ones, checked against it."""
    names = ", ".join(table.name for table in chosen)
    if isinstance(given, nn.Module):
        if len(chosen) > 1:
            raise UserError(f"One table was given for {names}: give a mapping with one for each, or name a target.")
        given = {chosen[0].name: given}
    wanted = {place.name: table.name for table in chosen for place in table.places}
    for name in given:
        if name not in wanted:
            raise UserError(f"A table was given for {name}, which is not to be replaced: give one for {names}.")
    by_name = {wanted[name]: table for name, table in given.items()}
    for old in chosen:
        new, own, what = by_name.get(old.name), old.module, f"The table for {old.name}"
        if new is None:
            raise UserError(f"No table was given for {old.name}: add it to the mapping.")
        if not isinstance(new, CompactTable | TokenEmbedding):
            raise UserError(f"{what} is a {type(new).__name__}: give a CompactTable or a TokenEmbedding (DeFINE).")
        (rows, width), (own_rows, own_width) = (new.num_embeddings, new.embedding_dim), own.weight.shape
        if (rows, width) != (own_rows, own_width):
            raise UserError(f"{what} is {rows:,} × {width}, but the model's is {own_rows:,} × {own_width}.")
        if new.padding_idx not in (None, own.padding_idx):
            raise UserError(
                f"{what} has the padding row {new.padding_idx}, but the model's has {own.padding_idx}: fit it with "
                "the model's padding_idx, or with none."
            )
    return [by_name[old.name].to(old.module.weight.device) for old in chosen]


def _adoptions(model: nn.Module) -> list[Adoption]:
    """An ``Adoption`` for each outermost model of transformers here; nothing is changed yet."""
    if "transformers.modeling_utils" not in sys.modules:  # then no model of it can be here
        return []
    from torchdefine.adapt.huggingface import Adoption
    from torchdefine.adapt.pretrained import outermost_pretrained

    return [Adoption(pretrained) for pretrained in outermost_pretrained(model)]


def _numbers(model: nn.Module) -> int:
    """Parameters of a model, shared ones once; codes of a compact table count as parameters."""
    return sum(parameter.numel() for parameter in model.parameters()) + _codes(model)


def _codes(model: nn.Module) -> int:
    return sum(rows.own_codes for rows in model.modules() if isinstance(rows, Rows))


def _reported(model: nn.Module, swap: Swap) -> ReplacedTable:
    weight, after, stored = swap.old.module.weight, 0, 0
    heads = tuple(place.name for place in swap.old.heads)
    linear = (pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear) and pair[0] not in heads)
    for new in swap.new:  # an output layer keeps its old bias
        bias = getattr(new, "bias", None)
        after += _numbers(new) - (0 if bias is None else bias.numel())
        tensors = [tensor for name, tensor in new.state_dict().items() if name != "bias"]
        stored += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return ReplacedTable(
        names=tuple(place.name for place in swap.old.places),
        heads=heads,
        rows=weight.shape[0],
        width=weight.shape[1],
        parameters_before=weight.numel(),
        parameters_after=after,
        bytes_before=weight.numel() * weight.element_size(),
        bytes_after=stored,
        initial_rms=swap.initial_rms,
        untied=tuple(name for name, layer in linear if layer.weight.shape == weight.shape),
        packed=any(_codes(new) for new in swap.new),
    )


def _warn_of_growth(report: ReplacedTable, fresh: nn.Module | None, *, untied: bool) -> None:
    """A packed table may have more numbers of fewer bits, so it has grown only if its bytes have too."""
    if report.parameters_after <= report.parameters_before or report.bytes_after <= report.bytes_before:
        return
    kept, ways = "", ["give a smaller table", "or keep the old one"]
    if isinstance(fresh, DeFINE):
        sizes = f"a smaller map_dim (now {fresh.plan.map_dim}) or expand_dim (now {fresh.plan.config.expand_dim})"
        ways = [f"use {sizes}", "or keep the table"]
    if untied and report.heads:
        kept = f" with the old matrix that {', '.join(report.heads)} keeps"
        ways = ["use heads='tie'", ways[0].removeprefix("use "), ways[1]]
    frame: FrameType | None = sys._getframe()
    levels = 1  # up the stack to the user's own code
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torchdefine."):
        frame, levels = frame.f_back, levels + 1
    growth = f"{report.parameters_after:,} parameters in place of {report.parameters_before:,}"
    if report.packed:
        growth = f"{report.bytes_after:,} bytes in place of {report.bytes_before:,}"
    warnings.warn(
        f"The replacement of {', '.join(report.names)} is larger than the table, {growth}{kept}: {', '.join(ways)}.",
        stacklevel=levels,
    )
