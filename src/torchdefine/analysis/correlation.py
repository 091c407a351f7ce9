"""Correlation maps of embedding dimensions: of the finished table, of every layer of a unit, and of its groups.

The paper's M = EᵀE over the vocabulary, with each dimension brought to length 1, so that entry (i, j) is the cosine
between dimensions i and j. The map shows its absolute value: 1 on the diagonal, 0 where two dimensions are orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.table import id_chunks, in_evaluation
from torchdefine.embedding.unit import DefineUnit
from torchdefine.errors import UserError
from torchdefine.files import Meter, Progress

if TYPE_CHECKING:
    from torchdefine.analysis.run_summary import RunSummary

THRESHOLDS = (0.1, 0.25, 0.5)
WIDEST_LAYER_SHOWN = 512
"""Maps of wider layers are shown group by group only; the page would grow by megabytes otherwise."""


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
            widths = f"{len(self.cosines)} and {len(other.cosines)} wide"
            raise UserError(f"{self.name} and {other.name} are {widths}: only maps of equal width compare.")
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
        return self.values[~torch.eye(len(self.cosines), dtype=torch.bool)]


Rows = list[tuple[str, list[CorrelationMap]]]
"""Maps that stand side by side, with a title."""


def cosines_of(gram: Tensor) -> Tensor:
    """EᵀE → cosines; a dimension that is zero for every token is independent of all others."""
    lengths = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    cosines = gram * scale[:, None] * scale[None, :]
    cosines.diagonal().fill_(1.0)
    return cosines.clamp(-1, 1)


@torch.no_grad()
def embedding_maps(
    embedding: TokenEmbedding, *, centred: bool = False, progress: Progress | None = None
) -> dict[str, CorrelationMap]:
    """Maps of everything between the ids and the finished vector, in one pass over the vocabulary.

    "map" is what the table gives, "layer 1" … what each layer of a DeFINE unit gives, and "finished" the result.
    Only one Gram matrix for each is kept in memory, never a table. ``centred`` takes each dimension's mean away first,
    which makes the cosines Pearson's correlations; the paper does not.
    """
    grams: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    meter = Meter(embedding.num_embeddings, progress)
    with in_evaluation(embedding) as twin:
        for ids in id_chunks(embedding):
            for name, vectors in _stages(twin, ids).items():
                exact = vectors.double()
                grams[name] = grams.get(name, 0) + (exact.T @ exact).cpu()  # (d, d)
                sums[name] = sums.get(name, 0) + exact.sum(0).cpu()  # (d,)
            meter.advance(len(ids))
    if centred:
        grams = {n: gram - torch.outer(sums[n], sums[n]) / embedding.num_embeddings for n, gram in grams.items()}
    layers = embedding.unit.plan.layers[:-1] if isinstance(embedding.unit, DefineUnit) else ()
    groups = {f"layer {number}": layer.groups for number, layer in enumerate(layers, start=1)}
    return {name: CorrelationMap(name, cosines_of(gram), groups.get(name, 1)) for name, gram in grams.items()}


def _stages(embedding: TokenEmbedding, ids: Tensor) -> dict[str, Tensor]:
    small, shared = embedding.map(ids), embedding.features  # (chunk, n)
    if shared is not None:
        small = shared.before_unit(small, ids, None)
    stages = {"map": small}
    if isinstance(embedding.unit, DefineUnit):
        *layers, finished = embedding.unit.layer_outputs(small)
        stages |= {f"layer {number}": output for number, output in enumerate(layers, start=1)}
    else:
        finished = small if embedding.unit is None else embedding.unit(small)
    return {**stages, "finished": finished if shared is None else shared.behind_unit(finished, ids)}


def layout_rows(runs: list[RunSummary], finished: dict[str, CorrelationMap]) -> Rows:
    """The paper's layout: standard tables, then projected ones, then DeFINE, each by the width of its table.

    Adaptive tables without a unit, which the paper does not show, stand behind the standard ones.
    """
    kinds: dict[str, list[RunSummary]] = {"Standard": [], "Adaptive": [], "Projected": [], "DeFINE": []}
    for run in runs:
        embedding, unit = kinds_of(run.recipe)
        if unit in ("projection", "mlp") or embedding == "projective":
            kinds["Projected"].append(run)
        else:
            kinds.setdefault(embedding.capitalize() if unit == "none" else "DeFINE", []).append(run)

    def width(run: RunSummary) -> int:
        return getattr(getattr(run.recipe, "embedding", None), "map_dim", 0)

    return [(kind, [finished[run.name] for run in sorted(some, key=width)]) for kind, some in kinds.items() if some]


def kinds_of(recipe: Any) -> tuple[str, str]:
    """The kinds of embedding and unit; a task may have no such sections."""
    embedding, unit = getattr(recipe, "embedding", None), getattr(recipe, "unit", None)
    return getattr(embedding, "kind", "standard"), getattr(unit, "kind", "none")


def layer_rows(stages: dict[str, CorrelationMap]) -> Rows:
    """The paper's layer-wise layout: the map, every expansion layer group by group, the finished vectors."""
    rows = []
    for name, stage in stages.items():
        if stage.groups > 1:
            rows.append((name, [stage.group(index) for index in range(min(stage.groups, 4))]))
        elif len(stage.cosines) <= WIDEST_LAYER_SHOWN:
            rows.append((name, [stage]))
    return rows


def numbers_table(
    maps: Iterable[CorrelationMap], reference: CorrelationMap | None = None
) -> tuple[list[str], list[list[str]]]:
    """What the pictures show, in numbers; the last column compares with ``reference``."""
    header = ["map", "dimensions", "mean |cosine|", *(f"above {t}" for t in THRESHOLDS), "effective rank"]
    rows = []
    for one in maps:
        above = [f"{one.fraction_above(t):.1%}" for t in THRESHOLDS]
        row = [one.name, str(len(one.cosines)), f"{one.mean_off_diagonal:.4f}", *above, f"{one.effective_rank:.1f}"]
        if reference is not None:
            row.append(f"{one.distance(reference):.4f}" if one.cosines.shape == reference.cosines.shape else "–")
        rows.append(row)
    return [*header, f"distance to {reference.name}"] if reference is not None else header, rows


def standard_table(runs: list[RunSummary], finished: dict[str, CorrelationMap]) -> CorrelationMap | None:
    """The map that the others are compared with, if there is one."""
    plain = (run.name for run in runs if kinds_of(run.recipe) == ("standard", "none"))
    return next((finished[name] for name in plain if name in finished), None)
