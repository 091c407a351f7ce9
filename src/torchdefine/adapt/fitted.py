"""What a fit has found: every candidate as it came out, the front, the choice, and a picture of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.analysis.pictures import COLOURS, drawing, save_figure
from torchdefine.analysis.tables import print_table
from torchdefine.tables import Budget, CompactTable
from torchdefine.tables.budget import readable_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*<>"
WIDE = 8


@dataclass(frozen=True)
class Measured:
    """One candidate as it came out."""

    method: str
    name: str
    bytes: int
    values: int
    quality: float
    table_error: float
    """Fraction of the frequency-weighted variance that is lost."""
    seconds: float


def front_of(measured: Iterable[Measured]) -> list[Measured]:
    """The Pareto front: no candidate as small or smaller is as good. Smallest first."""
    front: list[Measured] = []
    for one in sorted(measured, key=lambda one: (one.bytes, -one.quality)):
        if not front or one.quality > front[-1].quality:
            front.append(one)
    return front


@dataclass(frozen=True)
class Skipped:
    """A candidate that could not be made, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Fitted:
    """The chosen table, and all that was measured on the way."""

    table: CompactTable
    chosen: Measured
    measured: list[Measured]
    skipped: list[Skipped]
    budget: Budget
    quality_name: str

    @property
    def front(self) -> list[Measured]:
        """The Pareto front of all candidates, smallest first."""
        return front_of(self.measured)

    @property
    def why(self) -> str:
        """One sentence on the choice."""
        if len(self.measured) == 1:
            return f"{self.chosen.name}, {readable_bytes(self.chosen.bytes)}. No other method was tried."
        count = f"{len(self.measured)} candidates within {self.budget}"
        sentence = f"{self.chosen.name} was chosen: it has the best {self.quality_name} of {count}."
        others = [one for one in self.measured if one.method != self.chosen.method]
        if not others:
            return sentence
        second = max(others, key=lambda one: one.quality)
        return f"{sentence} The best of the other methods is {second.name}."

    def print(self) -> None:
        """All candidates, the best first, and the choice."""
        front, rows = self.front, []
        for one in sorted(self.measured, key=lambda one: -one.quality):
            size = f"{one.values / 1e6:.2f} M" if self.budget.floats_only else readable_bytes(one.bytes)
            numbers = f"{one.quality:.4f}", f"{one.table_error:.4f}", f"{one.seconds:.1f}"
            rows.append([f"{one.name}{' *' if one in front else ''}", size, *numbers])
        size = "parameters" if self.budget.floats_only else "size"
        header = ["table (* on the Pareto front)", size, self.quality_name, "variance lost", "seconds"]
        print_table(header, rows, self.why)

    def draw(self, path: str | Path) -> None:
        """The front as a picture: .png, .svg or .pdf."""
        save_figure(points_figure(self.measured, self.front, self.quality_name, self.chosen), Path(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "budget_bytes": self.budget.bytes,
            "floats_only": self.budget.floats_only,
            "quality": self.quality_name,
            "chosen": self.chosen.name,
            "why": self.why,
            "candidates": [asdict(one) | {"on_front": one in self.front} for one in self.measured],
            "skipped": [asdict(one) for one in self.skipped],
        }


def points_figure(
    measured: list[Measured], front: list[Measured], quality_name: str, chosen: Measured | None = None
) -> Figure:
    """Sizes on a logarithmic axis if they differ much; a point's distance from perfect on another."""
    best = max(1.0, max(one.quality for one in measured))
    sizes = [one.bytes for one in measured]
    wide = max(sizes) > WIDE * min(sizes)  # a narrow range has no powers of ten to be labelled
    with drawing() as figure_class:
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

        figure = figure_class(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for index, method in enumerate(dict.fromkeys(one.method for one in measured)):
            some = [one for one in measured if one.method == method]
            x, y = [one.bytes for one in some], [best - one.quality for one in some]
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            axes.scatter(x, y, s=26, color=colour, marker=marker, label=method)
        line = [one.bytes for one in front], [best - one.quality for one in front]
        axes.plot(*line, color="#888888", linewidth=1, zorder=0, label="front")
        if chosen:
            axes.scatter([chosen.bytes], [best - chosen.quality], s=130, facecolors="none", edgecolors="#444444")
        axes.set(xscale="log" if wide else "linear", xlabel="bytes (log scale)" if wide else "bytes")
        axes.set(yscale="log", ylabel=f"{quality_name} (log scale of what is missing)")
        axes.invert_yaxis()
        if wide:
            ticks = [digit * 10**power for power in range(13) for digit in (1, 2, 5)]
            axes.xaxis.set_major_locator(FixedLocator([t for t in ticks if min(sizes) / 2 < t < 2 * max(sizes)]))
            axes.set_xlim(0.8 * min(sizes), 1.25 * max(sizes))
        low, high = sorted(axes.get_ylim())
        losses = [digit * 10**-power for power in range(7) for digit in (5, 2, 1)]
        axes.yaxis.set_major_locator(FixedLocator([loss for loss in losses if low <= loss <= high]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{best - value:.4g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False, fontsize=8)
        return figure
