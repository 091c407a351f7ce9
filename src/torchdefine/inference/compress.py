"""The finished vectors of an embedding, packed into a file beside its weights.

The file is a compact table with a hash of the weights that it was made from, and is refused with any others. To compare
methods at equal bytes, those that can have any size use the whole budget, or as many bytes as the given codes would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.inference.cache import computing, weights_sha256
from torchdefine.inference.code_learning import CodeLearning
from torchdefine.inference.codes import CodedRows
from torchdefine.inference.compact_table import CompactTable, load_table
from torchdefine.inference.sizes import largest_fitting, low_rank_bytes, table_bytes
from torchdefine.inference.tables import (
    Counts,
    as_weights,
    coded_table,
    lost_variance,
    product_quantised_table,
    quantised_table,
    svd_table,
)
from torchdefine.inference.transform import transform_table
from torchdefine.spelling import did_you_mean

MOST_ENTRIES = 8192
"""The most entries of all codebooks together, which are solved for at once."""


@dataclass(frozen=True)
class Compression:
    """How a finished table is packed."""

    method: str = "codes"
    """codes: sums of one entry from each codebook; product-codes: k-means of chunks; svd: a low rank in int8; bits:
    bits by importance, each in as many bytes as codes; int8, int4: a step for each 32 numbers."""
    codebooks: int = 32
    entries: int = 16
    learning: CodeLearning = field(default_factory=CodeLearning)
    budget: int | None = None
    """Bytes at most, in place of ``codebooks``; not for int8 and int4, whose size is fixed."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"The method {self.method!r} is unknown{did_you_mean(self.method, METHODS)}")
        for name in ("codebooks", "entries"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                example = {"codebooks": 32, "entries": 16}[name]
                raise UserError(f"{name} is {value!r}, but must be a whole number of at least 1: use {example}, say.")
        if self.codebooks * self.entries > MOST_ENTRIES:
            raise UserError(
                f"{self.codebooks} codebooks of {self.entries} have more than {MOST_ENTRIES:,} entries in all, which "
                f"would take too long to solve for: use {max(MOST_ENTRIES // self.entries, 1)} codebooks, say."
            )
        if self.budget is not None and self.method.startswith("int"):
            raise UserError(f"{self.method} takes as many bytes as it needs: use the method bits with a budget, say.")
        if self.budget is not None and self.budget < 1:
            raise UserError(f"The budget is {self.budget} bytes, but must be at least 1.")

    def __str__(self) -> str:
        return f"codes {self.codebooks} × {self.entries}" if self.method == "codes" else self.method


@dataclass(frozen=True)
class Compressed:
    """A packed table, its size, and how much of the vectors it has lost."""

    table: CompactTable
    method: str
    bytes: int
    finished_bytes: int
    """The bytes of the vectors as float32."""
    map_bytes: int
    """The bytes of the map's tables and projections, from which they are computed, as float32."""
    lost: float
    """Share of the variance of all vectors that is gone."""
    lost_by_frequency: float | None
    """The same, tokens weighted by how often they occur, where that is known."""

    def to_dict(self) -> dict[str, Any]:
        names = ("method", "bytes", "finished_bytes", "map_bytes", "lost", "lost_by_frequency")
        return {name: getattr(self, name) for name in names}


@torch.no_grad()
def compress_embedding(
    embedding: TokenEmbedding,
    how: Compression | None = None,
    *,
    counts: Counts | None = None,
    progress: Progress | None = None,
) -> Compressed:
    """Pack the finished vectors of an embedding; ``counts``, one for each id, give frequent tokens more precision."""
    how = _within_budget(how or Compression(), embedding)
    budget = how.budget or codes_bytes(embedding, how)  # refuses impossible sizes, before the work
    whole = 4 * embedding.num_embeddings * embedding.embedding_dim
    if not how.method.startswith("int") and budget >= whole:
        asked = "The budget allows" if how.budget else f"{how.codebooks} codebooks of {how.entries} take"
        raise UserError(f"{asked} {budget:,} bytes, and the vectors themselves take {whole:,}: ask for less.")
    with computing(embedding):
        matrix = embedding.table(dtype=torch.float32)  # (V, m)
    with torch.enable_grad():
        table = METHODS[how.method](matrix, how, budget, counts, progress)
    table.padding_idx = embedding.padding_idx  # its vector is exactly zero
    weights = None if counts is None else as_weights(counts, matrix, power=1.0)  # as often as they occur
    return Compressed(
        table,
        str(how),
        table.stored_bytes,
        matrix.numel() * 4,
        sum(p.numel() * 4 for p in embedding.map.parameters()),  # type: ignore[attr-defined]
        lost_variance(table, matrix),
        None if weights is None else lost_variance(table, matrix, weights),
    )


def _within_budget(how: Compression, embedding: TokenEmbedding) -> Compression:
    """Codes of as many codebooks as the budget allows; for other methods, and without a budget, nothing changes."""
    if how.budget is None or how.method != "codes":
        return how
    most = largest_fitting(
        MOST_ENTRIES // how.entries, lambda books: codes_bytes(embedding, replace(how, codebooks=books)), how.budget
    )
    if not most:
        raise UserError(f"No codes of {how.entries} entries fit {how.budget:,} bytes: ask for more, or fewer entries.")
    return replace(how, codebooks=most)


def codes_bytes(embedding: TokenEmbedding, how: Compression) -> int:
    """The bytes that codes of that many books and entries take for this embedding."""
    return table_bytes(CodedRows, embedding.num_embeddings, embedding.embedding_dim, 1, how.codebooks, how.entries)


def write_compressed(path: Path, embedding: TokenEmbedding, made: Compressed, facts: Mapping[str, Any]) -> None:
    """Write a packed table for the weights that an embedding has now."""
    made.table.save(path, {**facts, **made.to_dict(), "weights_sha256": weights_sha256(embedding)})


def use_compressed(path: Path, embedding: TokenEmbedding, facts: Mapping[str, Any]) -> None:
    """Let an embedding look its vectors up in a packed table, until it is trained again.

    A file that is missing, damaged, or made from other weights or for another vocabulary is refused.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: write it with `torchdefine compress` first.")
    table = load_table(path, {**facts, "weights_sha256": weights_sha256(embedding)})
    embedding.eval()
    embedding.look_up(table.to(next(embedding.map.parameters()).device))  # type: ignore[attr-defined]


Pack = Callable[[Tensor, Compression, int, Counts | None, Progress | None], CompactTable]


def _codes(
    matrix: Tensor, how: Compression, budget: int, counts: Counts | None, progress: Progress | None
) -> CompactTable:
    return coded_table(matrix, how.codebooks, how.entries, counts=counts, learning=how.learning, progress=progress)


def _product_codes(
    matrix: Tensor, how: Compression, budget: int, counts: Counts | None, progress: Progress | None
) -> CompactTable:
    """Many chunks of few entries, or few of many, in the same bytes: whichever loses less."""
    rows, width = matrix.shape
    tried = []
    for entries in (16, 256):
        divisors = [parts for parts in range(1, width + 1) if width % parts == 0]
        fitting = [parts for parts in divisors if table_bytes(CodedRows, rows, width, parts, 1, entries) <= budget]
        if fitting and rows >= entries:
            tried.append(product_quantised_table(matrix, fitting[-1], entries, counts=counts, progress=progress))
    if not tried:
        raise UserError(f"No product codes of this table fit {budget:,} bytes: ask for more.")
    weights = None if counts is None else as_weights(counts, matrix)
    return min(tried, key=lambda table: lost_variance(table, matrix, weights))


def _svd(
    matrix: Tensor, how: Compression, budget: int, counts: Counts | None, progress: Progress | None
) -> CompactTable:
    rows, width = matrix.shape
    rank = largest_fitting(width, partial(low_rank_bytes, rows, width, "int8", 0), budget)
    if not rank:
        raise UserError(f"No low rank of this table fits {budget:,} bytes: ask for more.")
    return svd_table(matrix, rank, counts=counts, storage="int8")


def _bits(
    matrix: Tensor, how: Compression, budget: int, counts: Counts | None, progress: Progress | None
) -> CompactTable:
    return transform_table(matrix, budget, counts=counts)


def _whole_numbers(
    bits: int, matrix: Tensor, how: Compression, budget: int, counts: Counts | None, progress: Progress | None
) -> CompactTable:
    return quantised_table(matrix, bits, progress=progress)


METHODS: dict[str, Pack] = {
    "codes": _codes,
    "product-codes": _product_codes,
    "svd": _svd,
    "bits": _bits,
    "int8": partial(_whole_numbers, 8),
    "int4": partial(_whole_numbers, 4),
}
