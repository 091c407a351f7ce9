"""The ways of packing a table, by name. This file needs no torch, so that the command line lists them at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchdefine.errors import UserError
from torchdefine.spelling import did_you_mean

if TYPE_CHECKING:
    from torchdefine.tables.source import Method


@dataclass(frozen=True)
class Entry:
    """A method as a menu shows it, and where its class is."""

    where: str
    summary: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = True
    """Made in seconds, not minutes."""
    in_fit: bool = True
    """False for a size that another entry tries too."""

    def kind(self) -> type[Method]:
        file, name = self.where.split(":")
        found: type[Method] = getattr(import_module(file), name)
        return found


_HERE = "torchdefine.tables"

METHODS: dict[str, Entry] = {
    "bits": Entry(f"{_HERE}.bits:Bits", "rotated, then 0 to 8 bits a number by importance; loses least in most tables"),
    "svd": Entry(f"{_HERE}.low_rank:LowRank", "a low rank"),
    "frequent": Entry(f"{_HERE}.low_rank:FrequentRows", "frequent rows whole, a low rank for the rest"),
    "int": Entry(f"{_HERE}.quantised:Quantised", "as many bits a number as fit, a step for each row or 32 numbers"),
    "int8": Entry(f"{_HERE}.quantised:Quantised", "8 bits a number, a step for each 32", {"bits": 8}, in_fit=False),
    "int4": Entry(f"{_HERE}.quantised:Quantised", "4 bits a number, a step for each 32", {"bits": 4}, in_fit=False),
    "define": Entry(f"{_HERE}.units:FittedUnit", "a narrow table through a DeFINE unit, fitted", quick=False),
    "mlp": Entry(f"{_HERE}.units:FittedUnit", "a narrow table through an MLP, fitted", {"unit": "mlp"}, quick=False),
    "codes": Entry(
        f"{_HERE}.code_learning:Codes",
        "one entry from each of M codebooks of K, summed; learnt (Shu & Nakayama, 2018)",
        quick=False,
    ),
}


def table_method(name: str, **settings: Any) -> Method:
    """A method, with settings of its own in place of the usual ones."""
    if name not in METHODS:
        raise UserError(f"The method {name!r} is unknown{did_you_mean(name, METHODS)}")
    entry = METHODS[name]
    return entry.kind()(**{**entry.settings, **settings})
