"""What several commands have in common."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torchdefine.errors import UserError

Option = Callable[..., Any]
"""The ``add_argument`` of a command."""
Command = Callable[..., Option]
"""Adds a command: its name, its function, a summary, and text before and after the options in its help."""

CHECKPOINTS = ["best", "last", "average"]
SHARED: dict[str, dict[str, Any]] = {
    "folder": {"metavar": "RUN", "help": "the folder of a run"},
    "folders": {"metavar": "RUN", "nargs": "+", "help": "the folders of runs"},
    "--checkpoint": {"default": "best", "choices": CHECKPOINTS, "help": "which weights to load (default: best)"},
    "--cached": {"action": "store_true", "help": "look vectors up in the table that `torchdefine cache` wrote"},
    "--compressed": {"action": "store_true", "help": "look vectors up in the table that `torchdefine compress` wrote"},
    "--device": {"help": "cpu or cuda (default: a GPU if there is one)"},
    "--json": {"action": "store_true", "help": "print JSON"},
}
LOADING = ("--checkpoint", "--cached", "--compressed", "--device")
"""How to open a run."""


def whole(text: str) -> int:
    """A whole number of the command line."""
    from torchdefine.config import MOST, convert

    try:
        value: int = convert(int, text, "it")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
    if abs(value) > MOST:
        raise argparse.ArgumentTypeError(f"it is {value}, but must be at most {MOST:,}")
    return value


def add_shared(option: Option, *names: str) -> None:
    """Add arguments that mean the same to every command."""
    for name in names:
        option(name, **SHARED[name])


def open_run(options: argparse.Namespace) -> Any:
    """The run in a command's folder, by those of ``LOADING`` that the command has."""
    from torchdefine.run import load_run

    return load_run(options.folder, **{n[2:]: getattr(options, n[2:]) for n in LOADING if hasattr(options, n[2:])})


def bar(what: str) -> AbstractContextManager[Any]:
    """A bar for long work."""
    from torchdefine.training.progress import work_bar

    return work_bar(what)


def show(options: argparse.Namespace, facts: Any, lines: Iterable[str]) -> None:
    """Print what a command found: the facts as JSON where that was asked for, else the lines."""
    if options.json:
        print_json(facts)
    else:
        print("\n".join(lines))


def print_json(value: Any) -> None:
    """Print JSON with null for numbers that are not finite, and escapes where the output may lack a character."""
    from torchdefine.files import finite_only

    escaped = (sys.stdout.encoding or "utf-8").lower() not in ("utf-8", "utf8")
    print(json.dumps(finite_only(value), indent=2, ensure_ascii=escaped, allow_nan=False))


def data_settings(options: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a text, including --data."""
    if options.data is None:
        return dict(given)
    if given.get("corpus", options.data) != options.data:
        raise UserError(f"--data {options.data} and --data.corpus {given['corpus']} are two texts: name one.")
    return {**given, "corpus": options.data}


def refuse_idle(options: argparse.Namespace, names: Sequence[str], where: str) -> None:
    """Refuse options that were given though they have no effect."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if given:
        means, them = ("mean", "them") if len(given) > 1 else ("means", "it")
        raise UserError(f"{', '.join(given)} {means} nothing {where}: leave {them} out.")
