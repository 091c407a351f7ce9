"""The best replacement of a table for a size: many are made, all are measured, one is chosen."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from torchdefine.adapt.fitted import Fitted, Measured, Skipped
from torchdefine.adapt.kept import Kept
from torchdefine.errors import MachineError, UserError
from torchdefine.files import Progress
from torchdefine.tables import METHODS, Budget, Candidate, CompactTable, Method, Source, table_method
from torchdefine.tables.budget import readable_bytes
from torchdefine.tables.source import Counts, TableLike, as_matrix, as_weights, lost_variance

Quality = Callable[[nn.Module], float]
TICKS = 100
"""Units of progress for each second that a candidate takes about."""


@dataclass(frozen=True)
class FitOptions:
    """How candidates are made and judged."""

    quality: Quality | None = None
    """Larger is better, on text that nothing else was fitted to (``Behaviour.similarity``); by default the fraction of
    the table's frequency-weighted variance that is kept."""
    quality_name: str = "quality"
    sensitivity: Tensor | None = None
    """From ``Behaviour.sensitivity``: how sensitive the model is to an error in each direction."""
    polish: Callable[[CompactTable, Progress | None], Any] | None = None
    """Trains the best candidate in place (``distill``) and reports its progress; kept if it measures better."""
    polish_seconds: int = 200
    """What that takes about; progress goes by it."""
    kept: Kept | None = None
    """Where finished candidates are kept, so that they need not be made again."""
    methods: Sequence[str] = tuple(name for name, entry in METHODS.items() if entry.in_fit)
    """Names of ``tables.METHODS``."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of a method, by its name."""


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
    methods = {name: table_method(name, **options.settings.get(name, {})) for name in options.methods}
    if not methods:
        raise UserError("FitOptions.methods is empty, so there is nothing to try: leave it out.")
    source = Source(as_matrix(table), counts, options.sensitivity, padding_idx)
    judge = _Judge(source.matrix, as_weights(counts, source.matrix), options.quality)
    rows, width = source.matrix.shape
    if allowed.bytes >= (whole := 4 * rows * width):
        raise UserError(f"{allowed} are no less than the {readable_bytes(whole)} of the table itself: allow less.")
    planned = [(name, one) for name, method in methods.items() for one in method.within(rows, width, allowed)]
    ends = list(accumulate(METHODS[name].seconds for name, _ in planned))
    total = TICKS * ((ends[-1] if ends else 0) + (options.polish_seconds if options.polish else 0))
    best: tuple[Measured, int, CompactTable | None] | None = None
    for index, (method, candidate) in enumerate(planned):
        seconds = METHODS[method].seconds
        share = _part(progress, TICKS * (ends[index] - seconds), TICKS * seconds, total)
        one, made = _candidate(index, method, candidate, replace(source, progress=share), judge, options.kept)
        if progress:
            progress(TICKS * ends[index], total)
        if isinstance(one, Skipped):
            judge.skipped.append(one)
        else:
            judge.measured.append(one)
            if best is None or one.quality > best[0].quality:
                best = (one, index, made)
    if best is None:
        raise _nothing_made(len(planned), methods, source, allowed, judge.skipped)
    chosen, index, made = best
    if made is None:
        assert options.kept
        made = options.kept.table(index).to(source.matrix.device)
    if options.polish is not None:
        chosen = judge.polished(
            chosen, made, options.polish, _part(progress, TICKS * ends[-1], TICKS * options.polish_seconds, total)
        )
        if progress:
            progress(total, total)
    return Fitted(made, chosen, judge.measured, judge.skipped, allowed, options.quality_name)


def _candidate(
    index: int, method: str, candidate: Candidate, source: Source, judge: _Judge, kept: Kept | None
) -> tuple[Measured | Skipped, CompactTable | None]:
    """What came of a candidate, and its table, unless an earlier process made and kept it."""
    if kept and (known := kept.candidate(index)):
        return known, None
    began, made = time.monotonic(), None
    try:
        made = candidate.build(source)
    except UserError as error:  # a size that this table is too small for
        outcome: Measured | Skipped = Skipped(candidate.label, str(error))
    else:
        outcome = judge.measure(method, candidate.label, made, time.monotonic() - began)
    if kept:
        kept.keep(index, outcome, made)
    return outcome, made


def _part(progress: Progress | None, start: int, length: int, total: int) -> Progress | None:
    """The progress of one piece of work as progress of the whole."""
    if progress is None:
        return None
    return lambda done, of: progress(start + length * done // max(of, 1), total)


class _Judge:
    """Measures tables by the caller's quality and by the weighted error, and keeps what came out."""

    def __init__(self, matrix: Tensor, weights: Tensor, quality: Quality | None) -> None:
        self.matrix, self.weights, self.quality = matrix, weights, quality
        self.measured: list[Measured] = []
        self.skipped: list[Skipped] = []

    def measure(self, method: str, name: str, table: CompactTable, seconds: float) -> Measured | Skipped:
        """What came of a candidate; one without a finite quality is left out."""
        error = lost_variance(table, self.matrix, self.weights)
        quality = 1 - error if self.quality is None else float(self.quality(table))
        if not math.isfinite(quality):
            return Skipped(name, f"Its quality is {quality}, so it cannot be ranked.")
        return Measured(method, name, table.stored_bytes, table.num_values, quality, error, round(seconds, 2))

    def polished(
        self,
        before: Measured,
        table: CompactTable,
        polish: Callable[[CompactTable, Progress | None], Any],
        progress: Progress | None,
    ) -> Measured:
        """Distil a table, and undo that if it failed or did not help; what the table then measures."""
        kept = {name: tensor.clone() for name, tensor in table.state_dict().items()}
        began, name = time.monotonic(), f"{before.name}, distilled"
        try:
            polish(table, progress)
            after = self.measure(before.method, name, table, before.seconds + time.monotonic() - began)
        except MachineError as error:  # it overflowed; the table before is still good
            after = Skipped(name, str(error))
        if isinstance(after, Skipped):
            self.skipped.append(after)
        else:
            self.measured.append(after)
            if after.quality > before.quality:
                return after
        table.load_state_dict(kept)
        return before


def _nothing_made(
    planned: int, methods: Mapping[str, Method], source: Source, allowed: Budget, skipped: Sequence[Skipped]
) -> UserError:
    """Why there is no table: the budget is too small, by how much if that is known, or all candidates failed."""
    sure = [method for method in methods.values() if method.sure_of_its_size]
    rows, width = source.matrix.shape

    def has_room(size: int) -> bool:
        return any(True for method in sure for _ in method.within(rows, width, Budget(size, allowed.floats_only)))

    sizes = range(1, 4 * rows * width)
    found = bisect_left(sizes, True, key=has_room)
    least = sizes[found] if found < len(sizes) else None
    if planned and (least is None or least <= allowed.bytes):
        tried = "The only candidate" if planned == 1 else f"The first of {planned} candidates"
        why = f"{tried}, {skipped[0].name}, failed: {skipped[0].reason}"
        return UserError(f"No smaller table could be made and measured. {why}")
    needed = "more" if least is None else f"{least}B or more"
    if least is not None and allowed.floats_only:
        needed = f"{math.ceil(least / 4):,} parameters or more"
    return UserError(f"{allowed} is too little for any replacement of this table: allow {needed}.")
