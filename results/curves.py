"""Pictures of results, the same file for the same numbers; validation curves of several runs in one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marked import in_one_word

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HERE = Path(__file__).parent


def draw_curves(name: str, runs: Mapping[str, dict[str, Any]]) -> str:
    """Draw the curve of each run, by its label, into figures/NAME.svg; returns the picture's path from here."""
    from matplotlib import ticker

    figure, (axes,) = empty_picture()
    for label, run in ((in_one_word(name), run) for name, run in runs.items()):
        points = [(point["tokens"] / 1e6, point["perplexity"]) for point in run["curve"]]
        axes.plot(*zip(*points, strict=True), marker=".", markersize=3, linewidth=1, label=label)
    axes.set(xlabel="million tokens", ylabel="validation perplexity", yscale="log")
    for axis_format in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis_format(ticker.FormatStrFormatter("%g"))
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return save_picture(figure, name)


def empty_picture(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A picture with panels beside each other, all of one height of perplexities."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "torchdefine"
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, panels, figsize=(7, 3.6), layout="constrained", sharey=True, squeeze=False)
    return figure, list(grid[0])


def save_picture(figure: Figure, name: str) -> str:
    """Write figures/NAME.svg; returns its path from here."""
    from matplotlib import pyplot

    path = HERE / "figures" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return str(path.relative_to(HERE))
