"""faiss's product quantiser with codebooks of 256 entries, as float32 as faiss has them."""

from __future__ import annotations

from typing import Any

import torch

from leaderboard.board import Method, Packed, Table

ENTRIES = 256


def pack(table: Table, budget: int) -> Packed | None:
    import faiss

    rows, width = table.source.matrix.shape
    books = 4 * ENTRIES * width
    fitting = [parts for parts in range(1, width + 1) if width % parts == 0 and rows * parts + books <= budget]
    if not fitting:
        return None
    quantiser: Any = faiss.ProductQuantizer(width, fitting[-1], 8)
    quantiser.cp.min_points_per_centroid = 1  # no warnings about small tables
    numbers = table.source.matrix.numpy()
    quantiser.train(numbers)
    back = torch.from_numpy(quantiser.decode(quantiser.compute_codes(numbers)))
    return Packed(back, rows * fitting[-1] + books, f"{fitting[-1]} parts")


METHOD = Method("faiss product quantisation", pack, {"entries": ENTRIES, "seed": "faiss's own"}, ("faiss-cpu",))
