"""The two kinds of failure a user meets; both carry one full sentence and no traceback on the command line."""


class UserError(ValueError):
    """Something the user gave cannot be used: the message names it, the rule and the way out (exit code 2)."""


class MachineError(RuntimeError):
    """The machine failed, not the user: a full disk, a lost network, a number that overflowed (exit code 1)."""


def check_count(name: str, value: object, way_out: str = "") -> None:
    """Refuse what is no whole number of at least 1; ``way_out`` ends the sentence."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}.")
    if value < 1:
        raise UserError(f"{name} is {value}, but must be at least 1{way_out and f': {way_out}'}.")
