"""Suggestions for names that were nearly right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the closest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else f": use one of {', '.join(names)}."


def did_you_mean_setting(dotted: str, known: Iterable[str]) -> str:
    """The same for SECTION.NAME: the closest of the section, or one of another section, or all that the section has."""
    names = list(known)
    section, _, name = dotted.rpartition(".")
    sections = dict.fromkeys(other.split(".", 1)[0] for other in names)
    own = [other.split(".", 1)[1] for other in names if other.startswith(f"{section}.")]
    close = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    if close:
        return f": did you mean '{section}.{close[0]}'?"
    elsewhere = [other for other in names if other.split(".", 1)[1] == name]
    if elsewhere:
        return f": did you mean {' or '.join(map(repr, elsewhere))}?"
    if own:
        return f": {section} has {', '.join(own)}."
    near = difflib.get_close_matches(section or name, sections, n=1, cutoff=0.6)
    return f": did you mean the section {near[0]!r}?" if near else f": its section is one of {', '.join(sections)}."
