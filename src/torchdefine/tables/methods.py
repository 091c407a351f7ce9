"""The vectors of an embedding, packed by one of the methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.packing import METHODS
from torchdefine.spelling import did_you_mean
from torchdefine.tables.budget import Budget
from torchdefine.tables.codes import Codes
from torchdefine.tables.compact_table import CompactTable
from torchdefine.tables.source import Counts, Method, Source, as_weights, lost_variance


def table_method(name: str, **settings: Any) -> Method:
    """A method, with settings of its own in place of the usual ones."""
    if name not in METHODS:
        raise UserError(f"The method {name!r} is unknown{did_you_mean(name, METHODS.names())}")
    made: Method = METHODS[name].method(**settings)
    return made


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
        problem = f"{method} would take {allowed.bytes:,} bytes, but the vectors themselves take only {whole:,}"
        raise UserError(f"{problem}: allow less.")
    best = next(packing.within(*shape, allowed), None)
    if best is None:
        raise UserError(f"No {method} table fits into {allowed.bytes:,} bytes: allow more, or use another method.")
    matrix = embedding.table(dtype=torch.float32, computing=True)  # (V, m)
    table = best.build(Source(matrix, counts, padding_idx=embedding.padding_idx, progress=progress))
    map_numbers = sum(part.numel() for part in embedding.map.parameters())  # type: ignore[attr-defined]
    by_use = None if counts is None else lost_variance(table, matrix, as_weights(counts, matrix, power=1.0))
    lost = lost_variance(table, matrix), by_use
    return Compressed(table, method, best.label, table.stored_bytes, whole, 4 * map_numbers, *lost)
