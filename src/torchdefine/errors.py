"""The two kinds of failure a user meets; both carry one full sentence and no traceback on the command line."""


class UserError(ValueError):
    """Something the user gave cannot be used: the message names it, the rule and the way out (exit code 2)."""


class MachineError(RuntimeError):
    """The machine failed, not the user: a full disk, a lost network, a number that overflowed (exit code 1)."""
