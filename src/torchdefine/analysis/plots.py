"""Single pictures of runs, for a paper."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchdefine.analysis.correlation import CorrelationMap, embedding_maps
from torchdefine.analysis.pictures import (
    Axis,
    curve_figure,
    groups_figure,
    maps_figure,
    parameter_figure,
    save_figure,
    undrawn_curves,
)
from torchdefine.analysis.report_maps import layer_rows, layout_rows
from torchdefine.analysis.run_summary import RunSummary, instead_of_the_best, summarise
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
