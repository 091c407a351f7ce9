"""Vectors without a model around them: how alike rows stay, and which rows are near."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leaderboard.board import Packed, Table
from leaderboard.methods.torchao_int import bytes_of
from torchdefine.adapt.measures import Measure, measured
from torchdefine.adapt.sentences import rank_correlation
from torchdefine.tables.source import Source

SEEN, NEIGHBOURS = 1_000, 10
"""Rows that are compared, and how many nearest ones of each."""


class Vectors(Table):
    """A matrix; with ``texts``, the token numbers of sentences, what becomes of their means is judged too."""

    def __init__(self, source: Source, facts: dict[str, Any], texts: Sequence[Sequence[int]] = ()) -> None:
        self.source, self.texts = source, texts
        rows, width = source.matrix.shape
        self.seen = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:SEEN]
        self.facts = {**facts, "shape": [rows, width], "rows_compared": len(self.seen)}
        self.sizes = (bytes_of(rows, width, 4), bytes_of(rows, width, 2), rows * width // 8)

    def judge(self, packed: Packed) -> tuple[dict[str, Measure], dict[str, Any]]:
        own, new = self.source.matrix, packed.matrix
        if packed.kept is not None:
            new = torch.zeros_like(own)
            new[packed.kept] = packed.matrix
        rows = F.cosine_similarity(own[self.seen], new[self.seen], dim=-1)
        near, found = self._neighbours(own), self._neighbours(new)
        same = (near.unsqueeze(-1) == found.unsqueeze(1)).any(-1).float().mean(-1)
        measures = {"cosine of rows": _mean(rows), "same neighbours": _mean(same)}
        if self.texts:
            before, after = (torch.stack([one[list(ids)].mean(0) for ids in self.texts]) for one in (own, new))
            measures["cosine of sentences"] = _mean(F.cosine_similarity(before, after, dim=-1))
            measures["rank correlation"] = measured(
                lambda some: rank_correlation(before[some], after[some]), len(before)
            )
        return measures, {}

    def _neighbours(self, matrix: Tensor) -> Tensor:
        """(rows compared, neighbours)"""
        unit = F.normalize(matrix, dim=-1)
        likes = unit[self.seen] @ unit.T
        likes[torch.arange(len(self.seen)), self.seen] = -2
        return likes.topk(NEIGHBOURS, -1).indices


def _mean(values: Tensor) -> Measure:
    return measured(mean_of(values), len(values))


def mean_of(values: Tensor) -> Callable[[Tensor], float]:
    return lambda some: float(values[some].mean())


def package_facts(package: Path) -> dict[str, Any]:
    return {"package": package.name, "sha256": hashlib.sha256(package.read_bytes()).hexdigest()}
