"""Draws the pictures that the docs show: `make figures`."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from torchdefine.analysis.pictures import COLOURS, drawing, save_figure
from torchdefine.embedding import UnitConfig, make_plan
from torchdefine.embedding.unit_plan import Plan

FIGURES = Path(__file__).parent / "figures"
OUTPUT_COLOUR, INPUT_COLOUR, REDUCE_COLOUR = COLOURS[:3]
COLUMN_GAP, BOX_WIDTH, STRIP_WIDTH, GROUP_GAP = 3.4, 0.55, 0.28, 0.012


def main() -> None:
    figure = draw_plan(make_plan(128, UnitConfig(expand_dim=1024, embedding_dim=384, depth=4)))
    save_figure(figure, FIGURES / "unit.svg")
    save_figure(draw_token_function(), FIGURES / "token-functions.svg")


def draw_token_function() -> Figure:
    """What a token's vector is made of, and where it feeds a model, from left to right."""
    with drawing() as figure_class:
        figure = figure_class(figsize=(9.0, 3.6), layout="constrained")
        axes = figure.add_subplot()
        boxes = {  # the middle of each box, its colour, whether it depends on the token before
            "row of the map": (1.0, 3.0, INPUT_COLOUR, False),
            "characters": (1.0, 2.2, INPUT_COLOUR, False),
            "frequency": (1.0, 1.4, INPUT_COLOUR, False),
            "bigrams": (1.0, 0.4, INPUT_COLOUR, True),
            "unit": (3.6, 2.2, OUTPUT_COLOUR, False),
            "token vector": (5.6, 2.2, REDUCE_COLOUR, False),
            "model's input": (8.0, 2.2, COLOURS[3], False),
            "output matrix": (8.0, 3.2, COLOURS[3], False),
            "every layer, gated": (8.0, 1.2, COLOURS[3], False),
        }
        for name, (x, y, colour, of_pairs) in boxes.items():
            style = {"facecolor": colour, "alpha": 0.35 if of_pairs else 0.6, "linestyle": "--" if of_pairs else "-"}
            axes.add_patch(Rectangle((x - 0.8, y - 0.28), 1.6, 0.56, edgecolor=colour, **style))
            axes.text(x, y, name, ha="center", va="center", fontsize=9)
        joins = [(name, "unit", "") for name in ("row of the map", "characters", "frequency")]
        joins += [("bigrams", "unit", "add or concat"), ("unit", "token vector", "")]
        joins += [("token vector", name, "") for name in ("output matrix", "model's input", "every layer, gated")]
        for one, other, label in joins:
            (x, y, *_, of_pairs), (end_x, end_y, *_) = boxes[one], boxes[other]
            _join(axes, (x + 0.8, y), (end_x - 0.8, end_y), label, dashed=of_pairs)
        _join(axes, (1.8, 0.4), (7.4, 1.92), "after", dashed=True)
        axes.set(xlim=(0, 9), ylim=(0, 3.6))
        axes.axis("off")
    return figure


def _join(axes: Axes, start: tuple[float, float], end: tuple[float, float], label: str, dashed: bool) -> None:
    arrow = {"arrowstyle": "-|>", "color": "#555555", "linestyle": "--" if dashed else "-"}
    axes.annotate("", end, start, arrowprops=arrow)
    axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.12, label, ha="left", va="top", fontsize=8)


def draw_plan(plan: Plan) -> Figure:
    """A DeFINE unit, read from left to right: every group of every layer, its input and its output, to scale."""
    with drawing() as figure_class:
        figure = figure_class(figsize=(2.2 + 2.3 * plan.depth, 4.6), layout="constrained")
        axes = figure.add_subplot()
        scale = 1.0 / max(max(layer.input_width, layer.output_width) for layer in plan)
        _boxes(axes, 0.0, BOX_WIDTH, plan.map_dim * scale, 1, INPUT_COLOUR)
        axes.text(BOX_WIDTH / 2, -0.06, f"map\n{plan.map_dim:,}", ha="center", va="top")
        before_x, before_width, before_colour = 0.0, plan.map_dim, INPUT_COLOUR
        for index, layer in enumerate(plan):
            x = (index + 1) * COLUMN_GAP
            read, written = layer.input_width * scale, layer.output_width * scale
            # A strip beside each group: how much of its input is the unit's own, and how much the previous output.
            strip, skipped = x - STRIP_WIDTH - 0.08, layer.skipped_width / layer.input_width
            input_groups = 1 if plan.config.skip == "concat" else layer.groups
            if skipped:
                _boxes(axes, strip, STRIP_WIDTH, read, input_groups, INPUT_COLOUR, until=skipped)
            _boxes(axes, strip, STRIP_WIDTH, read, input_groups, before_colour, alpha=0.45, since=skipped)
            reduces = plan.role(index) == "reduce"
            _boxes(axes, x, BOX_WIDTH, written, layer.groups, REDUCE_COLOUR if reduces else OUTPUT_COLOUR)
            flow = [before_x + BOX_WIDTH, x - STRIP_WIDTH - 0.1]
            axes.fill(
                [*flow, *flow[::-1]], [0, 0, read, before_width * scale], color="#777777", alpha=0.12, linewidth=0
            )
            groups = f"{layer.groups} group{'s' if layer.groups > 1 else ''}"
            label = f"{plan.role(index)} {index + 1}\n{layer.output_width:,}\n{groups}"
            axes.text(x + BOX_WIDTH / 2, -0.06, label, ha="center", va="top")
            before_x, before_width, before_colour = x, layer.output_width, OUTPUT_COLOUR
        if plan.config.skip in ("mix", "concat") and plan.depth > 1:
            _draw_skip_connections(axes, plan, scale)
        axes.set(xlim=(-0.4, plan.depth * COLUMN_GAP + 1.2), ylim=(-0.32, 1.16))
        axes.axis("off")
    return figure


def _boxes(
    axes: Axes,
    x: float,
    width: float,
    height: float,
    groups: int,
    colour: str,
    *,
    alpha: float = 0.85,
    since: float = 0.0,
    until: float = 1.0,
) -> None:
    """One box above another, for each group; ``since`` and ``until`` are parts of a group."""
    part = height / groups
    box = part - min(GROUP_GAP, part / 4)
    for group in range(groups):
        corner = (x, group * part + since * box)
        axes.add_patch(Rectangle(corner, width, (until - since) * box, facecolor=colour, alpha=alpha, linewidth=0))


def _draw_skip_connections(axes: Axes, plan: Plan, scale: float) -> None:
    """The direct link from the input to every later layer, over the top."""
    top, last, start = 1.06, plan.depth * COLUMN_GAP - STRIP_WIDTH, plan.map_dim * scale
    axes.plot([BOX_WIDTH / 2, BOX_WIDTH / 2, last], [start, top, top], color=INPUT_COLOUR, linewidth=1.6, zorder=0)
    for index, layer in enumerate(plan.layers[1:], start=2):
        x = index * COLUMN_GAP - STRIP_WIDTH
        arrow = {"arrowstyle": "-|>", "color": INPUT_COLOUR, "linewidth": 1.6}
        axes.annotate("", (x, layer.input_width * scale), (x, top), arrowprops=arrow)
    how = "split and mixed group by group" if plan.config.skip == "mix" else "put before the previous output"
    text = f"skip connections from the input: {how}"
    axes.text(last, top + 0.02, text, ha="right", va="bottom", color="#8a6000", fontsize=9)


if __name__ == "__main__":
    main()
