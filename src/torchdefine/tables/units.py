"""A DeFINE unit, or an MLP, over a small table, fitted to a wide one; both start as its weighted SVD."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchdefine.config import to_plain
from torchdefine.embedding import DefineUnit, DenseMLP, UnitConfig
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.tables.bits import metric
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable
from torchdefine.tables.low_rank import principal_directions
from torchdefine.tables.quantised import empty_rows, stored_rows
from torchdefine.tables.rows import DenseRows, Rows, rows_from_config
from torchdefine.tables.source import (
    Candidate,
    Counts,
    Method,
    RowDraws,
    Source,
    TableLike,
    as_matrix,
    as_weights,
    candidate,
    centred,
)

DEPTH = 3


class UnitRows(Rows):
    """(V × r) through a DeFINE unit or an MLP to (V × m)."""

    kind = "unit"

    def __init__(self, factor: Rows, unit: DefineUnit | DenseMLP) -> None:
        width = unit.plan.layers[-1].output_width if isinstance(unit, DefineUnit) else unit.reduce.out_features
        super().__init__(factor.num_rows, width)
        self.factor, self.unit = factor, unit.requires_grad_(False)

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        x = self.factor(rows, next(self.unit.parameters()).dtype)  # (…, r)
        return self.unit(x).to(dtype)  # (…, m)

    def described(self) -> dict[str, Any]:
        return {"kind": self.kind, "factor": self.factor.described(), "unit": _unit_config(self.unit)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        return cls(rows_from_config(settings["factor"]), _unit_from_config(settings["unit"]))


def _unit_config(unit: DefineUnit | DenseMLP) -> dict[str, Any]:
    if isinstance(unit, DenseMLP):
        given, hidden, width = unit.expand.in_features, unit.expand.out_features, unit.reduce.out_features
        sizes = {"input_dim": given, "hidden_dim": hidden, "output_dim": width}
        return {"kind": "mlp", **sizes, "equalised": unit.equalised}
    return {"kind": "define", "map_dim": unit.plan.map_dim, "unit": to_plain(unit.config)}


def _unit_from_config(config: dict[str, Any]) -> DefineUnit | DenseMLP:
    settings = dict(config)
    if settings.pop("kind") == "mlp":
        return DenseMLP(**settings)
    return DefineUnit(settings["map_dim"], UnitConfig.read(settings["unit"], "unit"))


@dataclass(frozen=True)
class UnitFitting:
    """How a unit is trained on the table."""

    steps: int = 2_000
    batch_size: int = 2_048
    lr: float = 3e-3
    storage: str = "float32"
    """Of the small table; the unit's own weights have this type if it is a float, else float16."""
    seed: int = 0


def unit_table(
    table: TableLike,
    unit: str,
    map_dim: int,
    *,
    counts: Counts,
    sensitivity: Tensor | None = None,
    fitting: UnitFitting | None = None,
    padding_idx: int | None = None,
    progress: Progress | None = None,
) -> CompactTable:
    """A table V × ``map_dim`` with a "define" unit or an "mlp" behind it, trained to give back ``table``.

    The unit's hidden layers are at least as wide as the table and twice the map, so it starts exactly as the SVD.
    """
    fitting = fitting or UnitFitting()
    matrix = as_matrix(table)
    weights = as_weights(counts, matrix)
    rows, mean = centred(matrix, weights)
    root, back = metric(sensitivity, rows)
    with torch.random.fork_rng([]):  # leaves the caller's random state alone
        torch.default_generator.manual_seed(fitting.seed)  # only the CPU's, where the unit is drawn
        made = make_unit(unit, map_dim, rows.shape[1]).to(rows.device)
    directions = principal_directions(rows @ root, map_dim, weights)  # (n, m)
    coefficients = rows @ root @ directions.T  # (V, n)
    scale = coefficients.square().mean(0).sqrt().clamp(min=1e-7)
    size = rows.square().mean().sqrt().clamp(min=1e-7)  # learning rates are for vectors of unit size
    start_as_projection(made, scale[:, None] * directions @ back / size)
    small = nn.Parameter(coefficients / scale)
    _train(small, made, rows / size @ root, root, weights, fitting, progress)
    with torch.no_grad():
        last_weight(made).mul_(size)
    factor = stored_rows(small.detach(), fitting.storage)
    if not isinstance(factor, DenseRows):
        made.half()
    elif fitting.storage != "float32":
        made.to(factor.weight.dtype)
    return CompactTable(UnitRows(factor, made), mean, padding_idx)


def make_unit(unit: str, map_dim: int, width: int) -> DefineUnit | DenseMLP:
    """The unit of a candidate: hidden layers as wide as the vectors, or twice the map where that is more."""
    hidden = max(width, 2 * map_dim)
    if unit == "define":
        return DefineUnit(map_dim, UnitConfig(embedding_dim=width, expand_dim=-(-hidden // 4) * 4, depth=DEPTH))
    if unit == "mlp":
        return DenseMLP(map_dim, hidden, width)
    raise UserError(f"The unit {unit!r} is unknown: use define or mlp.")


@torch.no_grad()
def start_as_projection(unit: DefineUnit | DenseMLP, projection: Tensor) -> None:
    """Set a unit's weights so that it gives x @ projection, (n, m), with everything else ready to learn.

    A DeFINE unit's last layer has a skip connection from its input; in an MLP, gelu(x) - gelu(-x) = x carries it.
    """
    n = len(projection)
    if isinstance(unit, DefineUnit):
        unit.last.weight.zero_()
        unit.last.weight[0, :n] = projection
        return
    unit.reduce.weight.zero_()
    for sign, start in ((1.0, 0), (-1.0, n)):
        unit.expand.weight[start : start + n] = sign * torch.eye(n, device=projection.device)
        unit.expand.bias[start : start + n] = 0.0
        unit.reduce.weight[:, start : start + n] = sign * projection.T


def last_weight(unit: DefineUnit | DenseMLP) -> Tensor:
    """The weight of the layer, linear and without bias, that gives the vectors."""
    return unit.last.weight if isinstance(unit, DefineUnit) else unit.reduce.weight


def _train(
    small: nn.Parameter,
    unit: nn.Module,
    wanted: Tensor,
    root: Tensor,
    weights: Tensor,
    fitting: UnitFitting,
    progress: Progress | None,
) -> None:
    """Weighted least squares, in the metric of the model's sensitivity, over rows drawn by weight."""
    generator = torch.Generator(device=wanted.device).manual_seed(fitting.seed)
    draws = RowDraws(weights, generator)
    groups: list[dict[str, Any]] = [{"params": [small], "lr": 3 * fitting.lr}, {"params": list(unit.parameters())}]
    optimizer = torch.optim.Adam(groups, fitting.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, fitting.steps)
    variance = (weights @ wanted.square()).sum()
    unit.requires_grad_(True)
    for step in range(fitting.steps):
        batch = draws.draw(fitting.batch_size)
        error = unit(small[batch]) @ root - wanted[batch]  # (B, m)
        loss = (error.square().sum(-1) * draws.left[batch]).mean() / variance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if progress and ((step + 1) % 20 == 0 or step + 1 == fitting.steps):
            progress(step + 1, fitting.steps)
    unit.requires_grad_(False)


@dataclass(frozen=True)
class FittedUnit(Method):
    """The widest map that fits, four bits a number or in float32, with a "define" unit or an "mlp" behind it."""

    unit: str = "define"
    training: UnitFitting = field(default_factory=UnitFitting)

    def within(self, source: Source, budget: Budget) -> Iterator[Candidate]:
        rows, width = source.matrix.shape
        training = replace(self.training, storage="float32" if budget.floats_only else "int4")
        quarter = budget.largest(width // 4, partial(_bytes, rows, width, self.unit, training.storage))
        if quarter:
            map_dim = 4 * quarter  # as the groups of a DeFINE unit need
            label = f"{'DeFINE' if self.unit == 'define' else 'MLP'} {map_dim}, {training.storage}"
            make = partial(unit_table, source.matrix, self.unit, map_dim, sensitivity=source.sensitivity)
            yield candidate(label, source, partial(make, fitting=training), reports=True)


def _bytes(rows: int, width: int, unit: str, storage: str, quarter: int) -> int:
    with torch.device("meta"):
        made = make_unit(unit, 4 * quarter, width)
        made = made if storage == "float32" else made.half()
        return CompactTable(UnitRows(empty_rows(storage, rows, 4 * quarter), made)).stored_bytes
