"""What several commands have in common."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchdefine.errors import UserError

Command = Callable[..., argparse.ArgumentParser]
"""Adds a command: its name, its function, a summary, and text before and after the options in its help."""

CHECKPOINTS = ["best", "last", "average"]


def print_json(value: Any) -> None:
    """Print JSON with null for numbers that are not finite, and escapes where the output may lack a character."""
    from torchdefine.files import finite_only

    escaped = (sys.stdout.encoding or "utf-8").lower() not in ("utf-8", "utf8")
    print(json.dumps(finite_only(value), indent=2, ensure_ascii=escaped, allow_nan=False))


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_run(parser: argparse.ArgumentParser) -> None:
    """The run that a command uses."""
    parser.add_argument("folder", metavar="RUN", help="a run's folder")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """How to open the run that a command uses."""
    parser.add_argument("--checkpoint", default="best", choices=CHECKPOINTS, help="which weights (default: best)")
    add_cached(parser)
    add_device(parser)


def add_cached(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cached", action="store_true", help="look up what `torchdefine cache` wrote for these weights"
    )
    parser.add_argument(
        "--compressed", action="store_true", help="look up what `torchdefine compress` wrote for these weights"
    )


def loading(options: argparse.Namespace) -> dict[str, Any]:
    """What ``add_loading`` asked for."""
    return {name: getattr(options, name) for name in ("checkpoint", "device", "cached", "compressed")}


def data_settings(options: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a text, including --data."""
    if options.data is None:
        return dict(given)
    if given.get("corpus", options.data) != options.data:
        raise UserError(f"--data {options.data} and --data.corpus {given['corpus']} are two texts: name one.")
    return {**given, "corpus": options.data}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def refuse_idle(options: argparse.Namespace, names: Sequence[str], where: str) -> None:
    """Refuse options that were given though they have no effect."""
    given = [flag(name) for name in names if getattr(options, name) is not None]
    if given:
        means, them = ("mean", "them") if len(given) > 1 else ("means", "it")
        raise UserError(f"{', '.join(given)} {means} nothing {where}: leave {them} out.")
