"""The ways of packing a table, by name: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchdefine.errors import UserError
from torchdefine.spelling import did_you_mean
from torchdefine.tables.bits import Bits
from torchdefine.tables.code_learning import Codes
from torchdefine.tables.low_rank import FrequentRows, LowRank
from torchdefine.tables.quantised import Quantised
from torchdefine.tables.source import Method
from torchdefine.tables.units import FittedUnit


@dataclass(frozen=True)
class Entry:
    """A method as a menu shows it."""

    kind: type[Method]
    summary: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = True
    """Made in seconds, not minutes."""
    in_fit: bool = True
    """False for a size that another entry tries too."""


METHODS: dict[str, Entry] = {
    "bits": Entry(Bits, "rotated, then 0 to 8 bits a number by importance; loses least in most tables"),
    "svd": Entry(LowRank, "a low rank"),
    "frequent": Entry(FrequentRows, "frequent rows whole, a low rank for the rest"),
    "int": Entry(Quantised, "as many bits a number as fit, a step for each row or each 32 numbers"),
    "int8": Entry(Quantised, "8 bits a number, a step for each 32", {"bits": 8}, in_fit=False),
    "int4": Entry(Quantised, "4 bits a number, a step for each 32", {"bits": 4}, in_fit=False),
    "define": Entry(FittedUnit, "a narrow table through a DeFINE unit, fitted", quick=False),
    "mlp": Entry(FittedUnit, "a narrow table through an MLP, fitted", {"unit": "mlp"}, quick=False),
    "codes": Entry(
        Codes, "one of K entries from each of M codebooks, summed; learnt (Shu & Nakayama, 2018)", quick=False
    ),
}


def table_method(name: str, **settings: Any) -> Method:
    """A method, with settings of its own in place of the usual ones."""
    if name not in METHODS:
        raise UserError(f"The method {name!r} is unknown{did_you_mean(name, METHODS)}")
    entry = METHODS[name]
    return entry.kind(**{**entry.settings, **settings})
