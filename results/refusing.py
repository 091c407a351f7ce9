"""How the scripts of this folder end when they are asked for what cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torchdefine.errors import UserError


def run_or_refuse(main: Callable[[], None]) -> None:
    """One sentence and exit code 2, as the command line has it."""
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
