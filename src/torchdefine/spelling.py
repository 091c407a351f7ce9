"""Suggestions for names that were nearly right, and names that are right in Python and on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


def option(name: str) -> str:
    """An argument's name for a sentence to users of Python and of the command line: "out (--out)".

    Settings of a recipe do not need it: their dotted names, as in optim.lr, are the same everywhere.
    """
    return f"{name} (--{name.replace('_', '-')})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the closest known one, or all of them."""
    names = sorted(known)
    close = closest(name, names)
    return f": did you mean {close!r}?" if close else f": use one of {', '.join(names)}."


def did_you_mean_setting(dotted: str, known: Iterable[str], shape: str = "{!r}") -> str:
    """The same for SECTION.NAME: the closest in the section, or one of another section, or all of the section.

    ``shape`` is how a setting is written: as text, or as an option of the command line.
    """
    names = list(known)
    section, _, name = dotted.rpartition(".")
    sections = list(dict.fromkeys(other.split(".", 1)[0] for other in names))
    near = closest(section or name, sections)
    own = [other.split(".", 1)[1] for other in names if other.startswith(f"{section}.")]
    close = closest(name, own)
    if close:
        return f": did you mean {shape.format(f'{section}.{close}')}?"
    elsewhere = [other for other in names if other.split(".", 1)[1] == name]
    if elsewhere:
        return f": did you mean {' or '.join(map(shape.format, elsewhere))}?"
    if own:
        return f": {section} has {', '.join(own)}."
    return f": did you mean the section {near!r}?" if near else f": its section is one of {', '.join(sections)}."


def did_you_mean_section(name: str, value: Any, known: Iterable[str]) -> str:
    """The same for an argument in Python that is no section: the setting of that name, in its section."""
    settings = [dotted.split(".", 1) for dotted in known]
    near = closest(name, [setting for _, setting in settings])
    meant = [f"{section}={{{near!r}: {value!r}}}" for section, setting in settings if setting == near]
    sections = dict.fromkeys(section for section, _ in settings)
    return f": did you mean {' or '.join(meant)}?" if meant else f": use one of {', '.join(sections)}."


def closest(name: str, known: Sequence[str]) -> str | None:
    """The known name that is spelt most alike, or one that abbreviates the other: lr and learning_rate."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    abbreviated = [other for other in known if other == _initials(name) or name == _initials(other)]
    return next(iter([*close, *abbreviated]), None)


def _initials(name: str) -> str | None:
    parts = [part for part in name.split("_") if part]
    return "".join(part[0] for part in parts) if len(parts) > 1 else None


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
