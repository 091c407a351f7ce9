"""Parts that other installed packages offer by entry points, as those of the group ``torchdefine.context_model``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from torchdefine.errors import UserError

T = TypeVar("T")


@cache
def offered(part: str) -> Mapping[str, EntryPoint]:
    """What installed packages offer as such a part, by name. None of their code has run yet."""
    return {entry.name: entry for entry in entry_points(group=f"torchdefine.{part.replace(' ', '_')}")}


class Plugged(dict[str, T]):
    """Parts of one sort by name. One that another package offers is loaded when it is first asked for by its name."""

    def __init__(self, part: str, known: Mapping[str, T], made: Callable[[Any], T]) -> None:
        """``made`` makes a part of what an entry point names."""
        super().__init__(known)
        self.part, self.made = part, made

    def names(self) -> list[str]:
        """All names, those of other packages last."""
        return list(dict.fromkeys([*self, *offered(self.part)]))

    def register(self, name: str, part: T) -> None:
        """Add a part under a new name; one that another package offers may be registered by that package."""
        if super().__contains__(name):
            raise UserError(f"The {self.part} {name!r} is registered already: use another name.")
        self[name] = part

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in offered(self.part)

    def __missing__(self, name: str) -> T:
        entry = offered(self.part)[name]
        package = entry.dist.name if entry.dist else entry.value
        try:
            made = self.made(entry.load())
        except Exception as error:
            raise UserError(
                f"The {self.part} {name!r} of the package {package} cannot be loaded ({error}): install a version of "
                "it for this torchdefine, or remove it."
            ) from error
        return self.setdefault(name, made)  # the package may have registered it by itself
