"""Correlation maps of embedding dimensions: of the finished table, of every layer of a unit, and of its groups.

The paper's M = EᵀE over the vocabulary, with each dimension brought to length 1, so that entry (i, j) is the cosine
between dimensions i and j. The map shows its absolute value: 1 on the diagonal, 0 where two dimensions are orthogonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.table import id_chunks, in_evaluation
from torchdefine.embedding.unit import DefineUnit
from torchdefine.errors import UserError
from torchdefine.files import Progress

THRESHOLDS = (0.1, 0.25, 0.5)


@dataclass(frozen=True)
class CorrelationMap:
    """The cosines between the d dimensions of a table, (d, d) in float64; ``groups`` cut them into equal blocks."""

    name: str
    cosines: Tensor
    groups: int = 1

    @property
    def values(self) -> Tensor:
        """What the picture shows: absolute cosines, from 0 to 1."""
        return self.cosines.abs()

    @property
    def mean_off_diagonal(self) -> float:
        return float(self._off_diagonal().mean()) if len(self.cosines) > 1 else 0.0

    def fraction_above(self, threshold: float) -> float:
        """The fraction of pairs of dimensions whose absolute cosine is above ``threshold``."""
        return float((self._off_diagonal() > threshold).double().mean()) if len(self.cosines) > 1 else 0.0

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of the eigenvalues: d for independent dimensions, 1 if all are copies of one."""
        eigenvalues = torch.linalg.eigvalsh(self.cosines).clamp(min=0)
        return math.exp(float(torch.special.entr(eigenvalues / eigenvalues.sum()).sum()))

    def distance(self, other: CorrelationMap) -> float:
        """Mean absolute difference of the pictures of two tables of the same width."""
        if self.cosines.shape != other.cosines.shape:
            raise UserError(
                f"The maps of {self.name} and {other.name} are {len(self.cosines)} and {len(other.cosines)} wide: "
                "only maps of equal width compare."
            )
        return float((self.values - other.values).abs().mean())

    def group(self, index: int) -> CorrelationMap:
        """The map of one group's own dimensions."""
        width = len(self.cosines) // self.groups
        own = slice(index * width, (index + 1) * width)
        return CorrelationMap(f"{self.name}, group {index + 1}", self.cosines[own, own])

    def between_groups(self) -> Tensor:
        """Mean absolute cosine between the dimensions of every two groups, (g, g); within a group without itself."""
        width = len(self.cosines) // self.groups
        blocks = self.values.unflatten(1, (self.groups, width)).unflatten(0, (self.groups, width))
        means = blocks.mean(dim=(1, 3))
        if width > 1:  # the diagonal of ones says nothing about a group
            means.diagonal().copy_((means.diagonal() * width - 1) / (width - 1))
        return means

    def numbers(self) -> dict[str, Any]:
        return {
            "dimensions": len(self.cosines),
            "mean_off_diagonal": self.mean_off_diagonal,
            **{f"share_above_{threshold}": self.fraction_above(threshold) for threshold in THRESHOLDS},
            "effective_rank": self.effective_rank,
        }

    def _off_diagonal(self) -> Tensor:
        away = ~torch.eye(len(self.cosines), dtype=torch.bool)
        return self.values[away]


def cosines_of(gram: Tensor) -> Tensor:
    """EᵀE → cosines; a dimension that is zero for every token is independent of all others."""
    lengths = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    cosines = gram * scale[:, None] * scale[None, :]
    cosines.diagonal().fill_(1.0)
    return cosines.clamp(-1, 1)


@dataclass
class _Sums:
    """What one pass keeps of a stage: EᵀE and the sum of the rows."""

    gram: Tensor
    rows: Tensor

    def cosines(self, centred_by: int | None) -> Tensor:
        gram = self.gram
        if centred_by is not None:
            gram = gram - torch.outer(self.rows, self.rows) / centred_by
        return cosines_of(gram)


@torch.no_grad()
def embedding_maps(
    embedding: TokenEmbedding, *, centred: bool = False, progress: Progress | None = None
) -> dict[str, CorrelationMap]:
    """Maps of everything between the ids and the finished vector, in one pass over the vocabulary.

    "map" is what the table gives, "layer 1" … what each layer of a DeFINE unit gives, and "finished" the result.
    Only one Gram matrix for each is kept in memory, never a table. ``centred`` takes each dimension's mean away first,
    which makes the cosines Pearson's correlations; the paper does not.
    """
    sums: dict[str, _Sums] = {}
    done = 0
    with in_evaluation(embedding):
        for ids in id_chunks(embedding):
            for name, vectors in _stages(embedding, ids).items():
                exact = vectors.double()
                gram, rows = (exact.T @ exact).cpu(), exact.sum(0).cpu()  # (d, d), (d,)
                kept = sums.get(name)
                sums[name] = _Sums(kept.gram + gram, kept.rows + rows) if kept else _Sums(gram, rows)
            done += len(ids)
            if progress:
                progress(done, embedding.num_embeddings)
    groups = _groups(embedding)
    count = embedding.num_embeddings if centred else None
    return {name: CorrelationMap(name, kept.cosines(count), groups.get(name, 1)) for name, kept in sums.items()}


def _stages(embedding: TokenEmbedding, ids: Tensor) -> dict[str, Tensor]:
    small = embedding.map(ids)  # (chunk, n)
    stages = {"map": small}
    if isinstance(embedding.unit, DefineUnit):
        *layers, finished = embedding.unit.layer_outputs(small)
        stages |= {f"layer {number}": output for number, output in enumerate(layers, start=1)}
    else:
        finished = small if embedding.unit is None else embedding.unit(small)
    return {**stages, "finished": finished}


def _groups(embedding: TokenEmbedding) -> dict[str, int]:
    if not isinstance(embedding.unit, DefineUnit):
        return {}
    *layers, _ = embedding.unit.plan.layers
    return {f"layer {number}": layer.groups for number, layer in enumerate(layers, start=1)}
