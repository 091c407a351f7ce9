"""Pictures of runs and embeddings: curves, parameter bars, correlation maps. Colour-blind-safe, axes labelled."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchdefine.embedding.token_embedding import PART_NAMES
from torchdefine.errors import UserError
from torchdefine.files import atomic_file
from torchdefine.plain import escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from torchdefine.analysis.correlation import CorrelationMap
    from torchdefine.analysis.run_summary import RunSummary

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999")
"""Okabe and Ito's colours; every line also has a dash pattern of its own."""
LINES = ("-", "--", "-.", ":")
PART_COLOURS = {"input_output": COLOURS[0], "define": COLOURS[1], "context": COLOURS[2]}
MAP_COLOURS = "cividis"
INK = "#1b1c1d"
"""Text and axes; a page replaces it by its own text colour, so that pictures follow a dark theme."""

Axis = Literal["tokens", "step", "seconds"]
AXIS_NAMES: dict[Axis, str] = {
    "tokens": "training tokens",
    "step": "training steps",
    "seconds": "training time (seconds)",
}


@contextmanager
def drawing() -> Iterator[type[Figure]]:
    """matplotlib's Figure with our settings; the error names the extra where the package is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("Drawing needs the package matplotlib: pip install 'torchdefine[plot]'.") from None
    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    more: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "torchdefine",
        "savefig.transparent": True,
        "font.size": 10,
        "text.parse_math": False,  # what stands between dollars is a part of some run's name
    }
    with rc_context(more | dict.fromkeys(ink, INK)):
        yield Figure


def curve_figure(runs: Sequence[RunSummary], by: Axis = "tokens") -> Figure:
    """Validation perplexity of every run, with training perplexity as a thin line; that alone if there is no other.

    The legend names the runs that are not drawn, too, and why.
    """
    with drawing() as figure_class:
        from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

        figure = figure_class(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.add_subplot()
        has_thin_line = False
        for index, run in enumerate(runs):
            style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}
            valid, train = _points(run.valid, by), _points(run.train, by)
            if valid and train:
                has_thin_line = True
                axes.plot(*zip(*train, strict=True), linewidth=0.7, alpha=0.6, **style)
            if valid or train:
                label = _in_legend(run.name if valid else f"{run.name} (training)")
                axes.plot(*zip(*(valid or train), strict=True), label=label, marker="o", markersize=3.5, **style)
        if has_thin_line:
            axes.plot([], [], color="#888888", linewidth=0.7, label="training")
        counted = {u for run in runs if (u := run.fact("valid_unigram_perplexity"))}
        if len(counted) == 1:  # that of other vocabularies is another
            axes.axhline(counted.pop(), color="#888888", linewidth=1, linestyle=":", label="unigram")
        for sentence in undrawn_curves(runs):
            axes.plot([], [], linestyle="none", label=_in_legend(sentence.rstrip(".")))
        axes.set(xlabel=AXIS_NAMES[by], ylabel="perplexity (log scale)", yscale="log")
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.yaxis.set_major_locator(FixedLocator(readable_ticks(*axes.get_ylim())))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        return figure


def _in_legend(label: str) -> str:
    """The label with a space before an underscore, for a legend leaves out what begins with one."""
    return f" {label}" if label.startswith("_") else label


def undrawn_curves(runs: Sequence[RunSummary]) -> list[str]:
    """Sentences on runs of which a picture of curves shows nothing, or not all validations, or not the training."""
    sentences, smoothed = [], []
    for run in runs:
        finite = len(_points(run.valid, "step"))
        train = [record for record in run.train if "perplexity" in record]
        if not run.valid and not run.train:
            sentences.append(f"{run.name} is not drawn: it has logged nothing yet.")
        elif (run.valid or train) and not finite and not _points(train, "step"):
            sentences.append(f"{run.name} is not drawn: its perplexity is not finite.")
        elif finite < len(run.valid):
            sentences.append(f"{run.name} is drawn in part: some of its perplexities are not finite.")
        if run.train and not train:
            smoothed.append(run.name)
    if smoothed:
        whose = smoothed[0] if len(smoothed) == 1 else f"{len(smoothed)} runs"
        sentences.append(
            f"The training curve of {whose} is not drawn: a loss with label smoothing gives no perplexity."
        )
    return sentences


def _points(records: Sequence[dict[str, Any]], by: Axis) -> list[tuple[float, float]]:
    """What can be drawn of log lines; with label smoothing, those of the training have no perplexity."""
    return [(record[by], p) for record in records if math.isfinite(p := record.get("perplexity", math.inf))]


def readable_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the ends of a logarithmic axis: at least three, and as round as so many can be."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        within = [tick for tick in ticks if low <= tick <= high]
        if len(within) >= 4:
            return within
    from matplotlib.ticker import MaxNLocator

    return [float(tick) for tick in MaxNLocator(5, min_n_ticks=4).tick_values(low, high) if low <= tick <= high]


def parameter_figure(runs: Sequence[RunSummary]) -> Figure:
    """Who owns the parameters, a stacked bar a run."""
    counted = [(run.name, run.parameters) for run in runs if run.parameters]
    with drawing() as figure_class:
        figure = figure_class(figsize=(7.2, 1.2 + 0.42 * len(counted)), layout="constrained")
        axes = figure.add_subplot()
        left = [0.0] * len(counted)
        places = range(len(counted))  # a name may look like a number or a date
        for part, colour in PART_COLOURS.items():
            widths = [parameters[part] / 1e6 for _, parameters in counted]
            axes.barh(places, widths, left=left, color=colour, label=PART_NAMES[part], height=0.62)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, total in enumerate(left):
            axes.text(total, row, f" {total:.2f}", va="center", ha="left")
        axes.set(xlabel="millions of parameters", xlim=(0, 1.12 * max(left, default=1.0)))
        axes.set_yticks(places, [name for name, _ in counted])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1.0))
        return figure


def maps_figure(rows: Sequence[tuple[str, Sequence[CorrelationMap]]]) -> Figure:
    """Rows of correlation maps with a title each, as in the paper's appendix; numbers under every map."""
    columns = max(len(maps) for _, maps in rows)
    with drawing() as figure_class:
        width = 2.5 * columns
        figure = figure_class(figsize=(width + 0.8, 3.0 * len(rows)), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=[width, 0.8], squeeze=False)[0]
        strips = left.subfigures(len(rows), 1, squeeze=False)[:, 0]
        for strip, (title, maps) in zip(strips, rows, strict=True):
            strip.suptitle(title, fontweight="bold", fontsize=10)
            for axes, correlation in zip(strip.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
                image = _draw_map(axes, correlation)
        scale = right.add_axes((0.1, 0.5 - 0.9 / len(rows) / 2, 0.25, 0.9 / len(rows)))
        figure.colorbar(image, cax=scale, label="|cosine|")
        return figure


def map_numbers(correlation: CorrelationMap) -> str:
    """What stands under a map."""
    width = len(correlation.cosines)
    return f"mean {correlation.mean_off_diagonal:.3f}, rank {correlation.effective_rank:.0f} of {width}"


def _draw_map(axes: Axes, correlation: CorrelationMap) -> Any:
    axes.set_title(correlation.name, fontsize=9)
    axes.set_xlabel(map_numbers(correlation), fontsize=8)
    axes.set_ylabel("dimension", fontsize=8)
    axes.set(xticks=[], yticks=[])
    return axes.imshow(correlation.values.float().numpy(), vmin=0, vmax=1, cmap=MAP_COLOURS, interpolation="nearest")


def map_image(values: Tensor) -> str:
    """Values from 0 to 1 as a picture of as many pixels, in the colours of maps: the address of an HTML image."""
    with drawing():
        from matplotlib.image import imsave

        file = io.BytesIO()
        imsave(file, values.float().numpy(), vmin=0, vmax=1, cmap=MAP_COLOURS, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def groups_figure(layers: Sequence[CorrelationMap]) -> Figure:
    """Mean absolute cosine between the groups of every layer that has some: the orthogonality figure."""
    grouped = [layer for layer in layers if layer.groups > 1]
    if not grouped:
        raise UserError("No layer has more than one group, so there is nothing to compare: use a unit with groups.")
    with drawing() as figure_class:
        figure = figure_class(figsize=(3.2 * len(grouped) + 0.8, 3.4), layout="constrained")
        for axes, layer in zip(figure.subplots(1, len(grouped), squeeze=False)[0], grouped, strict=True):
            means = layer.between_groups()
            image = axes.imshow(means.numpy(), vmin=0, vmax=1, cmap=MAP_COLOURS)
            for row, values in enumerate(means.tolist()):
                for column, value in enumerate(values):
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="white", fontsize=8)
            ticks = range(layer.groups)
            axes.set(title=layer.name, xlabel="group", ylabel="group")
            axes.set_xticks(ticks, [str(tick + 1) for tick in ticks])
            axes.set_yticks(ticks, [str(tick + 1) for tick in ticks])
        figure.colorbar(image, ax=figure.axes, fraction=0.04, label="mean |cosine|")
        return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG, SVG or PDF, by the file's ending, on a white ground."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg", "pdf"):
        raise UserError(f"The picture {path} must end in .png, .svg or .pdf.")
    with drawing(), atomic_file(path) as file:
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(file, format=kind, dpi=160, facecolor="white", transparent=False, metadata=metadata)


def inline_svg(figure: Figure, description: str) -> str:
    """The figure as SVG for an HTML page, drawn in the page's own text colour."""
    text = io.StringIO()
    with drawing():
        figure.savefig(text, format="svg", dpi=110, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r' id="[A-Za-z]+_?\d+(_\d+)?"', "", svg)  # numbered alike in every figure, and nothing refers to them
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escaped(description)}" ', 1)
