"""The two kinds of failure a user meets; both carry one full sentence and no traceback on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchdefine.spelling import did_you_mean_setting

_NOT_PRINTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves the cursor, changes colours or the direction of writing, or is half a character."""


def printable(text: object) -> str:
    """Text that a terminal shows and does not obey: control characters but tab and newline as \\x1b, say."""
    return _NOT_PRINTED.sub(lambda sign: sign[0].encode("unicode_escape").decode(), str(text))


def in_a_line(error: Exception) -> str:
    """What another package says, so short that it fits into a sentence."""
    return " ".join(str(error).split())[:200].rstrip(".")


class UserError(ValueError):
    """Something the user gave cannot be used: the message names it, the rule and the way out."""

    exit_code = 2

    def __init__(self, sentence: object = "") -> None:
        super().__init__(printable(sentence))


class UnknownSetting(UserError):
    """A setting that no recipe has."""

    def __init__(self, dotted: str, known: Sequence[str]) -> None:
        self.dotted, self.known = dotted, known
        super().__init__(f"The setting {dotted!r} is unknown{did_you_mean_setting(dotted, known)}")

    def as_option(self) -> str:
        """The same sentence for somebody who wrote the setting on a command line."""
        return f"The setting --{self.dotted} is unknown{did_you_mean_setting(self.dotted, self.known, '--{}')}"


class MachineError(RuntimeError):
    """The machine failed, not the user: a full disk, a lost network, a number that overflowed."""

    exit_code = 1

    def __init__(self, sentence: object = "") -> None:
        super().__init__(printable(sentence))


def check_count(name: str, value: object, way_out: str = "") -> None:
    """Refuse what is no whole number of at least 1; ``way_out`` ends the sentence."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}.")
    if value < 1:
        raise UserError(f"{name} is {value}, but must be at least 1{way_out and f': {way_out}'}.")


def check_width(giver: str, width: int, taker: str, needs: int) -> None:
    """Refuse two parts of a model that do not fit each other."""
    if width != needs:
        raise UserError(f"The {giver} gives vectors {width} wide, but the {taker} takes {needs}.")
