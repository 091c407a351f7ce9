"""The two kinds of failure a user meets; both carry one full sentence and no traceback on the command line."""

from __future__ import annotations

import re

_NOT_PRINTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves the cursor, changes colours or the direction of writing, or is half a character."""


def printable(text: object) -> str:
    """Text that a terminal shows and does not obey: control characters but tab and newline as \\x1b, say."""
    return _NOT_PRINTED.sub(lambda sign: sign[0].encode("unicode_escape").decode(), str(text))


class UserError(ValueError):
    """Something the user gave cannot be used: the message names it, the rule and the way out."""

    exit_code = 2

    def __init__(self, sentence: object = "") -> None:
        super().__init__(printable(sentence))


class MachineError(RuntimeError):
    """The machine failed, not the user: a full disk, a lost network, a number that overflowed."""

    exit_code = 1

    def __init__(self, sentence: object = "") -> None:
        super().__init__(printable(sentence))
