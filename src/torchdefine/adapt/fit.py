"""The best replacement of a table for a size: many are made, all are measured, one is chosen."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchdefine.adapt.budget import Budget, readable_bytes
from torchdefine.adapt.candidates import FAMILIES, Candidate, Source, candidates
from torchdefine.adapt.unit_fitting import UnitFitting
from torchdefine.errors import MachineError, UserError
from torchdefine.files import Progress
from torchdefine.inference import CodeLearning, CompactTable
from torchdefine.inference.tables import Counts, TableLike, as_matrix, as_weights, lost_variance
from torchdefine.inference.transform import metric
from torchdefine.spelling import did_you_mean

Quality = Callable[[nn.Module], float]
TICKS = 100
"""Units of progress for each candidate."""
_UNSURE = ("transform", "tensor train")
"""Families that are planned without knowing whether they can be made: by their size, or for want of a package."""


@dataclass(frozen=True)
class FitOptions:
    """How candidates are made and judged."""

    quality: Quality | None = None
    """Larger is better, on text that nothing else was fitted to (``Behaviour.similarity``); by default the share of the
    table's frequency-weighted variance that is kept."""
    quality_name: str = "quality"
    sensitivity: Tensor | None = None
    """From ``Behaviour.sensitivity``: how sensitive the model is to an error in each direction."""
    polish: Callable[[CompactTable], Any] | None = None
    """Trains the best candidate in place (``distill``); kept if it measures better."""
    shares: tuple[float, ...] = (1.0,)
    """Sizes to look at, as shares of the budget; more of them draw a longer front."""
    families: tuple[str, ...] = ()
    """The families of candidates to try; all by default."""
    units: UnitFitting = field(default_factory=UnitFitting)
    codes: CodeLearning = field(default_factory=CodeLearning)


@dataclass(frozen=True)
class Measured:
    """One candidate as it came out."""

    family: str
    name: str
    bytes: int
    values: int
    quality: float
    table_error: float
    """Share of the frequency-weighted variance that is lost."""
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
        fitting = [one for one in self.measured if one.bytes <= self.budget.bytes and one != self.chosen]
        sentence = (
            f"{self.chosen.name} was chosen: its {self.quality_name} of {self.chosen.quality:.4f} at "
            f"{readable_bytes(self.chosen.bytes)} is the best of {len(fitting) + 1} candidates within {self.budget}"
        )
        others = [one for one in fitting if one.family != self.chosen.family]
        if not others:
            return f"{sentence}."
        second = max(others, key=lambda one: one.quality)
        return f"{sentence}; the best of the other families is {second.name} with {second.quality:.4f}."

    def print(self) -> None:
        """All candidates, the best first, and the choice."""
        from torchdefine.analysis.tables import print_table

        front = self.front
        rows = [
            [
                f"{one.name}{' *' if one in front else ''}",
                readable_bytes(one.bytes),
                f"{one.values / 1e6:.2f}",
                f"{one.quality:.4f}",
                f"{one.table_error:.4f}",
                f"{one.seconds:.1f}",
            ]
            for one in sorted(self.measured, key=lambda one: -one.quality)
        ]
        print_table(
            ["table (* on the front)", "size", "M numbers", self.quality_name, "table error", "s"], rows, self.why
        )

    def draw(self, path: str | Path) -> None:
        """The front as a picture: .png, .svg or .pdf."""
        from torchdefine.adapt.front_picture import front_figure
        from torchdefine.analysis.pictures import save_figure

        save_figure(front_figure(self), Path(path))

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


def fit(
    table: TableLike,
    counts: Counts,
    budget: int | str | Budget,
    *,
    options: FitOptions | None = None,
    padding_idx: int | None = None,
    progress: Progress | None = None,
) -> Fitted:
    """Find the best replacement of a V × m table within a budget ("1.5MB", "4M parameters", bytes).

    ``counts`` are the occurrences of each token id in text like that which the model will read. Work is done where the
    table is, CPU or GPU.
    """
    options = options or FitOptions()
    allowed = Budget.of(budget)
    _check_families(options.families)
    if not options.shares:
        raise UserError("FitOptions.shares is empty, so there is no size to look at: leave it out, or give (1.0,).")
    source = Source(as_matrix(table), counts, options.sensitivity, padding_idx)
    weights = as_weights(counts, source.table)
    metric(options.sensitivity, source.table)  # refuses a wrong shape or values, before the work
    whole = 4 * source.table.numel()
    if allowed.bytes >= whole:
        raise UserError(f"{allowed} are no less than the {readable_bytes(whole)} of the table itself: allow less.")
    planned = [c for share in options.shares for c in _planned(source, allowed.share(share), options)]
    if not planned:
        raise _too_little(allowed, _least_budget(source, allowed, options))
    judge = _Judge(source.table, weights, options.quality)
    best: tuple[Measured, CompactTable] | None = None
    measured: list[Measured] = []
    skipped: list[Skipped] = []
    total = len(planned) + (options.polish is not None)
    for index, candidate in enumerate(planned):
        began = time.monotonic()
        try:
            made = candidate.build(_within(progress, index, total))
        except UserError as error:  # an extra that is not installed, a size that this table is too small for
            skipped.append(Skipped(candidate.name, str(error)))
            continue
        finally:
            if progress:
                progress((index + 1) * TICKS, total * TICKS)
        one = judge.measure(candidate, made, time.monotonic() - began)
        if not _ranks(one, skipped):
            continue
        measured.append(one)
        if one.bytes <= allowed.bytes and (best is None or one.quality > best[0].quality):
            best = (one, made)
    if not measured:
        least = _least_budget(source, allowed, options)
        if least is not None and least > allowed.bytes:
            raise _too_little(allowed, least)
        why = f"{skipped[0].name}, failed because: {skipped[0].reason}"
        raise UserError(f"None of {len(planned)} replacements of this table could be measured; the first, {why}")
    if best is None:
        least = min(one.bytes for one in measured)
        raise UserError(f"No replacement of this table came out within {allowed}: allow {least:,} bytes or more.")
    if options.polish is not None:
        best = _polished(best, judge, options.polish, measured, skipped)
        if progress:
            progress(total * TICKS, total * TICKS)
    return Fitted(best[1], best[0], measured, skipped, allowed, options.quality_name)


def _check_families(families: tuple[str, ...]) -> None:
    for family in families:
        if family not in FAMILIES:
            raise UserError(f"The family {family!r} is unknown{did_you_mean(family, FAMILIES)}")


def _planned(source: Source, budget: Budget, options: FitOptions) -> Iterator[Candidate]:
    made = candidates(source, budget, units=options.units, codes=options.codes)
    return (one for one in made if not options.families or one.family in options.families)


def _least_budget(source: Source, allowed: Budget, options: FitOptions) -> int | None:
    """The fewest bytes that something is sure to fit; None where nothing is tried that is sure of its size."""

    def has_room(size: int) -> bool:
        planned = _planned(source, Budget(size, allowed.floats_only), options)
        return any(one.family not in _UNSURE for one in planned)

    sizes = range(1, 4 * source.table.numel())
    found = bisect_left(sizes, True, key=has_room)
    return sizes[found] if found < len(sizes) else None


def _too_little(allowed: Budget, least: int | None) -> UserError:
    needed = "more" if least is None else f"{least:,} bytes or more (a number alone counts bytes)"
    if least is not None and allowed.floats_only:
        needed = f"{math.ceil(least / 4):,} parameters or more"
    return UserError(f"{allowed} is too little for any replacement of this table: allow {needed}.")


def _within(progress: Progress | None, index: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, of: progress(index * TICKS + TICKS * done // max(of, 1), total * TICKS)


class _Judge:
    """Measures tables by the caller's quality and by the weighted error."""

    def __init__(self, matrix: Tensor, weights: Tensor, quality: Quality | None) -> None:
        self.matrix, self.weights, self.quality = matrix, weights, quality

    def measure(self, candidate: Candidate, table: CompactTable, seconds: float) -> Measured:
        error = lost_variance(table, self.matrix, self.weights)
        quality = 1 - error if self.quality is None else float(self.quality(table))
        family, name = candidate.family, candidate.name
        return Measured(family, name, table.stored_bytes, table.num_values, quality, error, round(seconds, 2))


def _ranks(one: Measured, skipped: list[Skipped]) -> bool:
    """Whether a quality is finite; a candidate whose quality is not counts as skipped."""
    if math.isfinite(one.quality):
        return True
    skipped.append(Skipped(one.name, f"Its quality is {one.quality}, so it cannot be ranked."))
    return False


def _polished(
    best: tuple[Measured, CompactTable],
    judge: _Judge,
    polish: Callable[[CompactTable], Any],
    measured: list[Measured],
    skipped: list[Skipped],
) -> tuple[Measured, CompactTable]:
    """The best table after distillation, or as it was if that failed or did not help."""
    before, table = best
    kept = {name: tensor.clone() for name, tensor in table.state_dict().items()}
    began = time.monotonic()
    taught = Candidate(before.family, f"{before.name}, distilled", lambda _: table)
    try:
        polish(table)
    except MachineError as error:  # it overflowed; the table before is still good
        skipped.append(Skipped(taught.name, str(error)))
    else:
        after = judge.measure(taught, table, before.seconds + time.monotonic() - began)
        if _ranks(after, skipped):
            measured.append(after)
        if after.quality > before.quality:
            return after, table
    table.load_state_dict(kept)
    return before, table
