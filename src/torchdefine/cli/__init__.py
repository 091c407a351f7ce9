"""The command line; no other package depends on it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

INTERRUPTED = 130
"""The exit code that shells give a command that Ctrl-C ended."""
SPINS = "1000"
"""How often an idle thread of torch's looks for work before it sleeps, a tenth of what is usual."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done, 1 failed, 2 misused, 130 stopped by Ctrl-C."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        # Beside other work on the machine, threads that wait busily make steps many times slower. Torch reads it once.
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    try:
        from torchdefine.cli.command_line import run_command

        run_command(arguments)
    except KeyboardInterrupt:
        _say_interrupted()
        sys.exit(INTERRUPTED)
    except Exhausted:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(1)
    sys.exit(0)


class Exhausted(SystemExit):
    """The process has too little of something, so what others want to do at its end would fail with a traceback."""


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process at once: as an exception it would crash libraries that are being loaded."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(*_: object) -> NoReturn:
        _say_interrupted()
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _say_interrupted() -> None:
    if sys.stderr is not None:
        print("torchdefine: Interrupted.", file=sys.stderr, flush=True)
