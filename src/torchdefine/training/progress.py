"""Showing a run to a person: a bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from torchdefine.errors import UserError, printable
from torchdefine.plain import raw_stream

SECONDS_BETWEEN_LINES = 15.0
"""Between lines about long work, where no bar is shown."""


class Reporter:
    """Shows a run to a person; this one shows nothing."""

    def started(self, done_steps: int, total_steps: int) -> None: ...

    def trained(self, record: dict[str, Any]) -> None:
        """A log line; with label smoothing its loss is the smoothed one, and there is no perplexity."""

    def validated(self, record: dict[str, Any]) -> None: ...

    def finished(self) -> None: ...


class LineReporter(Reporter):
    """One line at most every ``seconds_between`` seconds, and one for every validation: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None, seconds_between: float = 5.0) -> None:
        self.stream, self.seconds_between = stream, seconds_between

    def started(self, done_steps: int, total_steps: int) -> None:
        self.total, self.first, self.began, self.last_line = total_steps, done_steps, time.monotonic(), -1e9
        if done_steps:
            say(f"resuming from step {done_steps:,} of {total_steps:,}", self.stream)

    def trained(self, record: dict[str, Any]) -> None:
        now, step = time.monotonic(), record["step"]
        if now - self.last_line < self.seconds_between and step < self.total:
            return
        self.last_line = now
        left = clock((now - self.began) * (self.total - step) / max(step - self.first, 1))
        speed = f"{record['tokens_per_second']:,.0f} tokens/s"
        say(f"step {step:,}/{self.total:,}  {_losses(record, 3, '  perplexity ')}  {speed}  {left} left", self.stream)

    def validated(self, record: dict[str, Any]) -> None:
        best = "  best so far" if record["best"] else ""
        perplexity = shown_perplexity(record["perplexity"])
        say(f"step {record['step']:,}/{self.total:,}  validation perplexity {perplexity}{best}", self.stream)


class BarReporter(Reporter):
    """A live bar with loss, perplexity where there is one, speed and time left."""

    def started(self, done_steps: int, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # Narrow enough for a terminal of 80 columns.
        columns = (BarColumn(8), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(file=raw_stream(sys.stderr)))
        self.task = self.bar.add_task("starting", total=total_steps, completed=done_steps)
        self.valid = ""
        self.bar.start()

    def trained(self, record: dict[str, Any]) -> None:
        shown = f"{_losses(record, 2, ' ppl ')}{self.valid} {record['tokens_per_second'] / 1e3:,.1f}k tok/s"
        self.bar.update(self.task, completed=record["step"], description=shown)

    def validated(self, record: dict[str, Any]) -> None:
        self.valid = f" (valid {shown_perplexity(record['perplexity'], 1)})"

    def finished(self) -> None:
        self.bar.stop()


class TensorBoardReporter(Reporter):
    """Passes everything on to another reporter and also writes TensorBoard scalars."""

    def __init__(self, inner: Reporter, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("TensorBoard logs need the package tensorboard: pip install 'torchdefine[log]'.") from None
        self.inner, self.folder, self.writer_class = inner, folder, SummaryWriter

    def started(self, done_steps: int, total_steps: int) -> None:
        self.writer = self.writer_class(self.folder)
        self.inner.started(done_steps, total_steps)

    def trained(self, record: dict[str, Any]) -> None:
        self.writer.add_scalar(f"train/{loss_name(record).replace(' ', '_')}", record["loss"], record["step"])
        for name in ("lr", "gradient_norm", "tokens_per_second"):
            self.writer.add_scalar(f"train/{name}", record[name], record["step"])
        self.inner.trained(record)

    def validated(self, record: dict[str, Any]) -> None:
        self.writer.add_scalar("valid/perplexity", record["perplexity"], record["step"])
        self.inner.validated(record)

    def finished(self) -> None:
        self.writer.close()
        self.inner.finished()


def default_reporter() -> Reporter:
    return BarReporter() if _on_terminal() else LineReporter()


def watched() -> bool:
    """Whether somebody may be watching: at a terminal, or in a notebook."""
    return _on_terminal() or _in_notebook()


def say(sentence: str, stream: TextIO | None = None) -> None:
    """One line into ``stream``, by default where nothing else is printed: a notebook paints standard error red."""
    with suppress(OSError, ValueError):  # a closed pipe must not end a run
        usual = sys.stdout if _in_notebook() else sys.stderr
        print(printable(sentence), file=stream or usual or io.StringIO(), flush=True)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    return ipython is not None and ipython.get_ipython() is not None


def loss_name(record: dict[str, Any]) -> str:
    """What to call the loss of a log line."""
    return "smoothed loss" if "label_smoothing" in record else "loss"


def _losses(record: dict[str, Any], digits: int, then: str) -> str:
    perplexity = f"{then}{shown_perplexity(record['perplexity'], 1)}" if "perplexity" in record else ""
    return f"{loss_name(record)} {record['loss']:.{digits}f}{perplexity}"


def shown_perplexity(perplexity: float, digits: int = 2) -> str:
    """With commas while it is short enough to read, else in scientific notation."""
    return f"{perplexity:,.{digits}f}" if perplexity < 1e7 else f"{perplexity:.1e}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def work_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for any long work that reports (done, total), from its first report on; off a terminal, a line at times."""
    last_line = time.monotonic()

    def in_lines(done: int, total: int) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES and done < total:
            last_line = time.monotonic()
            say(f"{what}: {done / total:.0%}")

    if not _on_terminal():
        yield in_lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=raw_stream(sys.stderr)), transient=True)
    task = bar.add_task(what, start=True)

    def in_bar(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield in_bar
    finally:
        bar.stop()
