"""The two kinds of failure a user meets; both carry one full sentence and no traceback on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from torchdefine.spelling import did_you_mean_setting


class UserError(ValueError):
    """Something the user gave cannot be used: the message names it, the rule and the way out."""

    exit_code = 2


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
