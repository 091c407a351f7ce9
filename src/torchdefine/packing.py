"""The ways of packing a table, by name. A page of help lists them, so torch is not imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torchdefine.plugins import Plugged


@dataclass(frozen=True)
class Entry:
    """A method as a menu shows it."""

    kind: Any
    """A ``tables.Method``, or where it is, as ``module:Class``; then it is imported when it is first used."""
    summary: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: int = 5
    """What one table of 12 M numbers takes about, measuring included: progress goes by it."""
    in_fit: bool = True
    """False for a size that another entry tries too."""

    def method(self, **settings: Any) -> Any:
        """The method, with settings of its own in place of the usual ones."""
        kind = self.kind
        if isinstance(kind, str):
            module, _, name = kind.partition(":")
            kind = getattr(import_module(f"torchdefine.tables.{module}"), name)
        return kind(**{**self.settings, **settings})


_OWN = {
    "bits": Entry(
        "bits:Bits", "bits by importance: rotated, then 0 to 8 bits per number; usually loses least", seconds=30
    ),
    "used": Entry("used:Used", "bits by importance for used rows; one vector for all unused rows", seconds=30),
    "svd": Entry("low_rank:LowRank", "low rank (SVD)"),
    "frequent": Entry("low_rank:LowRank", "frequent rows in full, low rank for the rest", {"kept": (0.05, 0.15)}),
    "group-reduce": Entry(
        "group_reduce:GroupReduce", "blocks of rows, a low rank for each, by frequency (Chen et al., 2018)", seconds=30
    ),
    "slim": Entry("slim:Slim", "rows made of shared sub-vectors, found by k-means (after Li et al., 2018)", seconds=10),
    "int": Entry("quantised:Quantised", "as many bits per number as fit, one scale per row or per 32 numbers"),
    "int8": Entry("quantised:Quantised", "8 bits per number, one scale per 32 numbers", {"bits": 8}, in_fit=False),
    "int4": Entry("quantised:Quantised", "4 bits per number, one scale per 32 numbers", {"bits": 4}, in_fit=False),
    "define": Entry("fitted_unit:FittedUnit", "a narrow table through a DeFINE unit, fitted", seconds=200),
    "mlp": Entry("fitted_unit:FittedUnit", "a narrow table through an MLP, fitted", {"unit": "mlp"}, seconds=200),
    "codes": Entry(
        "codes:Codes", "the sum of an entry from each of M codebooks, learned (Shu & Nakayama, 2018)", seconds=200
    ),
}
METHODS: Plugged[Entry] = Plugged("table method", _OWN, lambda entry: entry)
