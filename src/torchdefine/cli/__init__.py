"""The command line: the only room that knows it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done, 1 failed, 2 misused."""
    try:
        from torchdefine.cli.command_line import run_command  # seconds, for torch comes with it

        run_command(arguments)
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("torchdefine: Interrupted.", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
