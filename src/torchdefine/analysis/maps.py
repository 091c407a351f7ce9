"""Correlation maps of runs: in which rows they stand, the numbers behind them, and single pictures for a paper."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.analysis.correlation import THRESHOLDS, CorrelationMap, embedding_maps
from torchdefine.analysis.pictures import (
    Axis,
    curve_figure,
    groups_figure,
    maps_figure,
    parameter_figure,
    save_figure,
    undrawn_curves,
)
from torchdefine.analysis.run_summary import RunSummary, instead_of_the_best, summarise
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDEST_LAYER_SHOWN = 512
"""Maps of wider layers are shown group by group only; the page would grow by megabytes otherwise."""
Rows = list[tuple[str, list[CorrelationMap]]]
"""Maps that stand side by side, with a title."""

log = logging.getLogger(__name__)


def draw(
    kind: str, folders: Sequence[str | Path], path: Path, *, by: Axis = "tokens", centred: bool = False
) -> list[str]:
    """Draw one kind of picture of the runs into a file; ``by`` is for curves and ``centred`` for maps.

    Gives a sentence for every run that could not be drawn.
    """
    runs = summarise(folders)
    save_figure(_figure(kind, runs, by, centred), path)
    return undrawn_curves(runs) if kind == "curves" else []


def _figure(kind: str, runs: list[RunSummary], by: Axis, centred: bool) -> Figure:
    if kind == "curves":
        return curve_figure(runs, by)
    if kind == "parameters":
        return parameter_figure(runs)
    if kind == "maps":
        finished = {run.name: CorrelationMap(run.name, _maps(run, centred)["finished"].cosines) for run in runs}
        return maps_figure(layout_rows(runs, finished))
    if len(runs) != 1:
        raise UserError(f"The picture {kind!r} is of one run, but {len(runs)} were given: draw one after another.")
    stages = _maps(runs[0], centred)
    if kind == "groups":
        return groups_figure(list(stages.values()))
    if "layer 1" not in stages:
        raise UserError(f"The run {runs[0].name} has no DeFINE unit, so it has no layers to draw: use the kind maps.")
    return maps_figure(layer_rows(stages))


def _maps(summary: RunSummary, centred: bool) -> dict[str, CorrelationMap]:
    run = summary.open()
    if run is None:
        raise UserError(f"The run in {summary.folder.path} has written no weights that can be read.")
    if note := instead_of_the_best(run):
        log.warning(note)
    return embedding_maps(run.embedding, centred=centred)


def layout_rows(runs: list[RunSummary], finished: dict[str, CorrelationMap]) -> Rows:
    """The paper's layout: standard tables, then projected ones, then DeFINE, each by the width of its table.

    Adaptive tables without a unit, which the paper does not show, stand behind the standard ones.
    """
    kinds: dict[str, list[RunSummary]] = {"Standard": [], "Adaptive": [], "Projected": [], "DeFINE": []}
    for run in runs:
        embedding, unit = kinds_of(run.recipe)
        if unit in ("projection", "mlp") or embedding == "projective":
            kinds["Projected"].append(run)
        elif unit == "none":
            kinds.setdefault(embedding.capitalize(), []).append(run)
        else:
            kinds["DeFINE"].append(run)

    def width(run: RunSummary) -> int:
        return int(getattr(getattr(run.recipe, "embedding", None), "map_dim", 0))

    return [(kind, [finished[run.name] for run in sorted(some, key=width)]) for kind, some in kinds.items() if some]


def kinds_of(recipe: Any) -> tuple[str, str]:
    """The kinds of embedding and unit; a task may have no such sections."""
    found = (getattr(getattr(recipe, section, None), "kind", None) for section in ("embedding", "unit"))
    embedding, unit = found
    return embedding or "standard", unit or "none"


def layer_rows(stages: dict[str, CorrelationMap]) -> Rows:
    """The paper's layer-wise layout: the map, every expansion layer group by group, the finished vectors."""
    rows = []
    for name, stage in stages.items():
        if stage.groups > 1:
            rows.append((name, [stage.group(index) for index in range(min(stage.groups, 4))]))
        elif len(stage.cosines) <= WIDEST_LAYER_SHOWN:
            rows.append((name, [stage]))
    return rows


def numbers_table(
    maps: Sequence[CorrelationMap], reference: CorrelationMap | None = None
) -> tuple[list[str], list[list[str]]]:
    """What the pictures show, in numbers."""
    header = ["map", "dimensions", "mean |cosine|", *(f"above {t}" for t in THRESHOLDS), "effective rank"]
    rows = []
    for one in maps:
        above = [f"{one.fraction_above(t):.1%}" for t in THRESHOLDS]
        row = [one.name, str(len(one.cosines)), f"{one.mean_off_diagonal:.4f}", *above, f"{one.effective_rank:.1f}"]
        if reference is not None:
            same = one.cosines.shape == reference.cosines.shape
            row.append(f"{one.distance(reference):.4f}" if same else "–")
        rows.append(row)
    return [*header, f"distance to {reference.name}"] if reference is not None else header, rows


def standard_table(runs: list[RunSummary], finished: dict[str, CorrelationMap]) -> CorrelationMap | None:
    """The map that the others are compared with, if there is one."""
    for run in runs:
        if run.name in finished and kinds_of(run.recipe) == ("standard", "none"):
            return finished[run.name]
    return None
