"""One file a method: its ``METHOD`` is found by the file's name."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from leaderboard.board import Method


def all_methods() -> dict[str, Method]:
    names = sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))
    return {name: import_module(f"{__name__}.{name}").METHOD for name in names}
