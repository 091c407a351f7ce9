"""A picture of a fit: bytes against quality, every candidate a point, the front a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdefine.adapt.budget import readable_bytes
from torchdefine.analysis.pictures import COLOURS, drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchdefine.adapt.fit import Fitted, Measured

MARKERS = "osD^vPX*<>"


def front_figure(fitted: Fitted) -> Figure:
    """Sizes on a logarithmic axis; a point's distance from perfect on another."""
    return points_figure(fitted.measured, fitted.front, fitted.quality_name, fitted.chosen)


def points_figure(
    measured: list[Measured], front: list[Measured], quality_name: str, chosen: Measured | None = None
) -> Figure:
    best = max(1.0, max(one.quality for one in measured))
    with drawing() as figure_class:
        from matplotlib.ticker import FuncFormatter

        figure = figure_class(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for index, family in enumerate(dict.fromkeys(one.family for one in measured)):
            points = [(one.bytes, best - one.quality) for one in measured if one.family == family]
            style: dict[str, Any] = {
                "s": 26,
                "color": COLOURS[index % len(COLOURS)],
                "marker": MARKERS[index % len(MARKERS)],
            }
            axes.scatter(*zip(*points, strict=True), label=family, **style)
        line = [(one.bytes, best - one.quality) for one in front]
        axes.plot(*zip(*line, strict=True), color="#888888", linewidth=1, zorder=0, label="front")
        if chosen:
            axes.scatter([chosen.bytes], [best - chosen.quality], s=130, facecolors="none", edgecolors="#444444")
        axes.set(
            xscale="log", yscale="log", xlabel="bytes (log scale)", ylabel=f"{quality_name} (log scale of the loss)"
        )
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{best - value:.4g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False, fontsize=8)
        return figure
