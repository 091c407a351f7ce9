"""The ways of packing a table, by name, and the vectors of an embedding packed by one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.spelling import did_you_mean
from torchdefine.tables.bits import Bits
from torchdefine.tables.codes import Codes
from torchdefine.tables.compact_table import CompactTable
from torchdefine.tables.low_rank import LowRank
from torchdefine.tables.quantised import Quantised
from torchdefine.tables.source import Budget, Counts, Method, Source, as_weights, lost_variance
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
    "bits": Entry(Bits, "rotated, 0 to 8 bits per number by importance; usually loses least"),
    "svd": Entry(LowRank, "low rank (SVD)"),
    "frequent": Entry(LowRank, "frequent rows whole, low rank for the rest", {"kept": (0.05, 0.15)}),
    "int": Entry(Quantised, "as many bits per number as fit, one scale per row or per 32 numbers"),
    "int8": Entry(Quantised, "8 bits per number, one scale per 32 numbers", {"bits": 8}, in_fit=False),
    "int4": Entry(Quantised, "4 bits per number, one scale per 32 numbers", {"bits": 4}, in_fit=False),
    "define": Entry(FittedUnit, "a narrow table through a DeFINE unit, fitted", quick=False),
    "mlp": Entry(FittedUnit, "a narrow table through an MLP, fitted", {"unit": "mlp"}, quick=False),
    "codes": Entry(
        Codes, "the sum of one of K entries from each of M codebooks, learned (Shu & Nakayama, 2018)", quick=False
    ),
}


def table_method(name: str, **settings: Any) -> Method:
    """A method, with settings of its own in place of the usual ones."""
    if name not in METHODS:
        raise UserError(f"The method {name!r} is unknown{did_you_mean(name, METHODS)}")
    entry = METHODS[name]
    return entry.kind(**{**entry.settings, **settings})


@dataclass(frozen=True)
class Compressed:
    """A packed table, its size, and how much of the vectors it has lost."""

    table: CompactTable
    method: str
    label: str
    """The method with its sizes."""
    bytes: int
    vectors_bytes: int
    """The bytes of the vectors as float32."""
    map_bytes: int
    """The bytes of the map's tables and projections, from which they are computed, as float32."""
    lost: float
    """Fraction of the variance of all vectors that is gone."""
    lost_by_frequency: float | None
    """The same, tokens weighted by how often they occur, where that is known."""

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "table"}


def compress_embedding(
    embedding: TokenEmbedding,
    method: str = "bits",
    budget: int | str | Budget | None = None,
    *,
    counts: Counts | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Compressed:
    """Pack the vectors of an embedding; ``counts``, one for each id, give frequent tokens more precision.

    ``method`` is one of ``METHODS``, ``settings`` are its own. Without a budget, codes and a number of bits have sizes
    of their own; other methods take as many bytes as 32 × 16 codes, but an eighth of the vectors at most.
    """
    packing, shape = table_method(method, **settings), (embedding.num_embeddings, embedding.embedding_dim)
    whole = 4 * shape[0] * shape[1]
    own = packing.usual_bytes(*shape) or min(Codes().usual_bytes(*shape), whole // 8)
    allowed = Budget(own) if budget is None else Budget.of(budget)
    if allowed.bytes >= whole:
        raise UserError(
            f"{method} would take {allowed.bytes:,} bytes, but the vectors themselves take only {whole:,}: allow less."
        )
    best = next(packing.within(*shape, allowed), None)
    if best is None:
        raise UserError(f"No {method} table fits into {allowed.bytes:,} bytes: allow more, or use another method.")
    with embedding.computing():
        matrix = embedding.table(dtype=torch.float32)  # (V, m)
    table = best.build(Source(matrix, counts, padding_idx=embedding.padding_idx, progress=progress))
    map_numbers = sum(part.numel() for part in embedding.map.parameters())  # type: ignore[attr-defined]
    by_use = None if counts is None else lost_variance(table, matrix, as_weights(counts, matrix, power=1.0))
    lost = lost_variance(table, matrix), by_use
    return Compressed(table, method, best.label, table.stored_bytes, whole, 4 * map_numbers, *lost)
