"""Showing a run to a person: a bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

from torchdefine.errors import UserError

SECONDS_BETWEEN_LINES = 15.0
"""Between lines about long work, where no bar is shown."""


class Reporter(Protocol):
    """Shows a run to a person."""

    def started(self, done_steps: int, total_steps: int) -> None: ...

    def trained(self, record: dict[str, Any]) -> None:
        """A log line; with label smoothing its loss is the smoothed one, and there is no perplexity."""

    def validated(self, record: dict[str, Any]) -> None: ...

    def finished(self) -> None: ...


class QuietReporter:
    """Says nothing."""

    def started(self, done_steps: int, total_steps: int) -> None: ...

    def trained(self, record: dict[str, Any]) -> None: ...

    def validated(self, record: dict[str, Any]) -> None: ...

    def finished(self) -> None: ...


class LineReporter:
    """One line at most every ``seconds_between`` seconds, and one for every validation: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None, seconds_between: float = 5.0) -> None:
        self.stream = stream or sys.stderr or io.StringIO()
        self.seconds_between = seconds_between

    def started(self, done_steps: int, total_steps: int) -> None:
        self.total, self.first, self.began, self.last_line = total_steps, done_steps, time.monotonic(), -1e9
        if done_steps:
            self._say(f"going on from step {done_steps:,} of {total_steps:,}")

    def trained(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self.last_line < self.seconds_between and record["step"] < self.total:
            return
        self.last_line = now
        left = (now - self.began) * (self.total - record["step"]) / max(record["step"] - self.first, 1)
        loss = f"{loss_name(record)} {record['loss']:.3f}"
        perplexity = f"  perplexity {shown_perplexity(record['perplexity'], 1)}" if "perplexity" in record else ""
        self._say(
            f"step {record['step']:,}/{self.total:,}  {loss}{perplexity}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {clock(left)} left"
        )

    def validated(self, record: dict[str, Any]) -> None:
        best = "  best so far" if record["best"] else ""
        perplexity = shown_perplexity(record["perplexity"])
        self._say(f"step {record['step']:,}/{self.total:,}  validation perplexity {perplexity}{best}")

    def finished(self) -> None: ...

    def _say(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a closed pipe must not end a run
            print(line, file=self.stream, flush=True)


class BarReporter:
    """A live bar with loss, perplexity where there is one, speed and time left."""

    def started(self, done_steps: int, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # Narrow enough for a terminal of 80 columns.
        columns = (BarColumn(8), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.task = self.bar.add_task("starting", total=total_steps, completed=done_steps)
        self.valid = ""
        self.bar.start()

    def trained(self, record: dict[str, Any]) -> None:
        loss = f"{loss_name(record)} {record['loss']:.2f}"
        perplexity = f" ppl {shown_perplexity(record['perplexity'], 1)}" if "perplexity" in record else ""
        speed = f"{record['tokens_per_second'] / 1e3:,.1f}k tok/s"
        self.bar.update(self.task, completed=record["step"], description=f"{loss}{perplexity}{self.valid} {speed}")

    def validated(self, record: dict[str, Any]) -> None:
        self.valid = f" (valid {shown_perplexity(record['perplexity'], 1)})"

    def finished(self) -> None:
        self.bar.stop()


class TensorBoardReporter:
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


def default_reporter() -> BarReporter | LineReporter:
    return BarReporter() if _on_terminal() else LineReporter(_stream())


def watched() -> bool:
    """Whether somebody may be watching: at a terminal, or in a notebook."""
    return _on_terminal() or _in_notebook()


def say(sentence: str) -> None:
    """One line where the default reporter writes."""
    with suppress(OSError, ValueError):
        print(sentence, file=_stream(), flush=True)


def _stream() -> TextIO:
    return (sys.stdout if _in_notebook() else sys.stderr) or io.StringIO()  # a notebook paints errors red


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    return ipython is not None and ipython.get_ipython() is not None


def loss_name(record: dict[str, Any]) -> str:
    """What to call the loss of a log line."""
    return "smoothed loss" if "label_smoothing" in record else "loss"


def shown_perplexity(perplexity: float, digits: int = 2) -> str:
    """With commas while it is short enough to read, else in scientific notation."""
    return f"{perplexity:,.{digits}f}" if perplexity < 1e7 else f"{perplexity:.1e}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _now_and_then(what: str) -> Callable[[int, int], None]:
    last_line = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES and done < total:
            last_line = time.monotonic()
            say(f"{what}: {done / total:.0%}")

    return report


@contextmanager
def work_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for any long work that reports (done, total); off a terminal, a line now and then.

    It appears with the first report.
    """
    if not _on_terminal():
        yield _now_and_then(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, start=True)

    def report(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield report
    finally:
        bar.stop()
