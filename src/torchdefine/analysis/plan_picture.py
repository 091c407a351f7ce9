"""A drawing of a DeFINE unit: every group of every layer, its input and its output, to scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdefine.analysis.pictures import COLOURS, drawing
from torchdefine.embedding.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

OUTPUT_COLOUR, INPUT_COLOUR, REDUCE_COLOUR = COLOURS[:3]
COLUMN_GAP, BOX_WIDTH, STRIP_WIDTH, GROUP_GAP = 3.4, 0.55, 0.28, 0.012


def draw_plan(plan: Plan) -> Figure:
    """A matplotlib figure of the unit, read from left to right."""
    with drawing() as figure_class:
        figure = figure_class(figsize=(2.2 + 2.3 * plan.depth, 4.6), layout="constrained")
        _draw_layers(figure.add_subplot(), plan)
    return figure


def _draw_layers(axes: Axes, plan: Plan) -> None:
    unit = 1.0 / max(max(layer.input_width, layer.output_width) for layer in plan)
    _column(axes, 0.0, plan.map_dim * unit, 1, INPUT_COLOUR)
    axes.text(BOX_WIDTH / 2, -0.06, f"map\n{plan.map_dim:,}", ha="center", va="top")
    previous_x, previous_width = 0.0, plan.map_dim
    for index, layer in enumerate(plan):
        x = (index + 1) * COLUMN_GAP
        colour = REDUCE_COLOUR if plan.role(index) == "reduce" else OUTPUT_COLOUR
        _inputs(axes, x - STRIP_WIDTH - 0.08, plan, index, unit)
        _column(axes, x, layer.output_width * unit, layer.groups, colour)
        _flow(axes, previous_x + BOX_WIDTH, previous_width * unit, x - STRIP_WIDTH - 0.1, layer.input_width * unit)
        groups = f"{layer.groups} group{'s' if layer.groups > 1 else ''}"
        label = f"{plan.role(index)} {index + 1}\n{layer.output_width:,}\n{groups}"
        axes.text(x + BOX_WIDTH / 2, -0.06, label, ha="center", va="top")
        previous_x, previous_width = x, layer.output_width
    if plan.config.skip in ("mix", "concat") and plan.depth > 1:
        _skip_line(axes, plan, unit)
    axes.set(xlim=(-0.4, plan.depth * COLUMN_GAP + 1.2), ylim=(-0.32, 1.16))
    axes.axis("off")


def _column(axes: Axes, x: float, height: float, groups: int, colour: str) -> None:
    for start, share in _shares(height, groups):
        axes.add_patch(_rectangle(x, start, BOX_WIDTH, share, colour))


def _inputs(axes: Axes, x: float, plan: Plan, index: int, unit: float) -> None:
    """A strip beside each group: how much of its input is the unit's own input, and how much the previous output."""
    layer = plan.layers[index]
    before = INPUT_COLOUR if index == 0 else OUTPUT_COLOUR
    groups = 1 if plan.config.skip == "concat" else layer.groups
    for start, share in _shares(layer.input_width * unit, groups):
        again = share * layer.skipped_width / layer.input_width
        if again:
            axes.add_patch(_rectangle(x, start, STRIP_WIDTH, again, INPUT_COLOUR))
        axes.add_patch(_rectangle(x, start + again, STRIP_WIDTH, share - again, before, alpha=0.45))


def _flow(axes: Axes, x0: float, height0: float, x1: float, height1: float) -> None:
    axes.fill([x0, x1, x1, x0], [0, 0, height1, height0], color="#777777", alpha=0.12, linewidth=0)


def _skip_line(axes: Axes, plan: Plan, unit: float) -> None:
    """The direct link from the input to every later layer, over the top."""
    top, last = 1.06, plan.depth * COLUMN_GAP - STRIP_WIDTH
    start = plan.map_dim * unit
    axes.plot([BOX_WIDTH / 2, BOX_WIDTH / 2, last], [start, top, top], color=INPUT_COLOUR, linewidth=1.6, zorder=0)
    for index in range(1, plan.depth):
        x = (index + 1) * COLUMN_GAP - STRIP_WIDTH
        arrow = {"arrowstyle": "-|>", "color": INPUT_COLOUR, "linewidth": 1.6}
        axes.annotate("", (x, plan.layers[index].input_width * unit), (x, top), arrowprops=arrow)
    how = "split and mixed group by group" if plan.config.skip == "mix" else "put before the previous output"
    axes.text(
        last,
        top + 0.02,
        f"skip connections from the input: {how}",
        ha="right",
        va="bottom",
        color="#8a6000",
        fontsize=9,
    )


def _shares(height: float, groups: int) -> list[tuple[float, float]]:
    share = height / groups
    gap = min(GROUP_GAP, share / 4)
    return [(group * share, share - gap) for group in range(groups)]


def _rectangle(x: float, y: float, width: float, height: float, colour: str, alpha: float = 0.85) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, alpha=alpha, linewidth=0)
