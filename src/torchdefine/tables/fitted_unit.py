"""A DeFINE unit, or an MLP, over a small table, fitted to a wide one; both start as its weighted SVD."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.embedding import UNITS, DefineUnit, DenseMLP, MLPConfig, UnitConfig
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.tables.bits import metric
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable
from torchdefine.tables.low_rank import principal_directions
from torchdefine.tables.quantised import stored_rows
from torchdefine.tables.rows import DenseRows, Rows
from torchdefine.tables.source import Candidate, Method, RowDraws, Source, TableLike, centred

DEPTH = 3


class UnitRows(Rows):
    """(V × r) through a unit, such as DeFINE's or an MLP, to (V × m)."""

    kind = "unit"

    def __init__(self, factor: Rows, config: Any) -> None:
        """``config`` is of a kind in ``UNITS``, or its plain values, as a file has them."""
        config = UNITS.read(config, "unit") if isinstance(config, dict) else config
        super().__init__(factor.num_rows, config.embedding_dim or factor.width)
        self.factor, self.config = factor, config
        made = DefineUnit(factor.width, config) if isinstance(config, UnitConfig) else config.build(factor.width)
        self.unit: nn.Module = made.requires_grad_(False)

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        x = self.factor(rows, next(self.unit.parameters()).dtype)  # (…, r)
        vectors: Tensor = self.unit(x)  # (…, m)
        return vectors.to(dtype)


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
    table: TableLike | Source, unit: str, map_dim: int, *, fitting: UnitFitting | None = None, **known: Any
) -> CompactTable:
    """A table V × ``map_dim`` with a "define" unit or an "mlp" behind it, trained to give back ``table``.

    The unit's hidden layers are at least as wide as the table and twice the map, so it starts exactly as the SVD.
    """
    fitting = fitting or UnitFitting()
    source = Source.of(table, **known)
    weights = source.weights()
    rows, mean = centred(source.matrix, weights)
    root, back = metric(source.sensitivity, rows)
    with torch.random.fork_rng([]):  # leaves the caller's random state alone
        torch.default_generator.manual_seed(fitting.seed)  # only the CPU's, where the unit is drawn
        made = UnitRows(DenseRows(len(rows), map_dim), unit_config(unit, map_dim, rows.shape[1]))
    start: Any = made.unit.to(rows.device)
    directions = principal_directions(rows @ root, map_dim, weights)  # (n, m)
    coefficients = rows @ root @ directions.T  # (V, n)
    scale = coefficients.square().mean(0).sqrt().clamp(min=1e-7)
    size = rows.square().mean().sqrt().clamp(min=1e-7)  # learning rates are for vectors of unit size
    last = start_as_projection(start, scale[:, None] * directions @ back / size)
    small = nn.Parameter(coefficients / scale)
    _train(small, made.unit, rows / size @ root, root, weights, fitting, source.progress)
    with torch.no_grad():
        last.mul_(size)
    made.factor = stored_rows(small.detach(), fitting.storage)
    made.unit.to(made.factor.weight.dtype if isinstance(made.factor, DenseRows) else torch.float16)
    return CompactTable(made, mean, source.padding_idx)


def unit_config(unit: str, map_dim: int, width: int) -> UnitConfig | MLPConfig:
    """The unit of a candidate: hidden layers as wide as the vectors, or twice the map where that is more."""
    hidden = max(width, 2 * map_dim)
    if unit == "define":
        return UnitConfig(embedding_dim=width, expand_dim=-(-hidden // 4) * 4, depth=DEPTH)
    if unit == "mlp":
        return MLPConfig(embedding_dim=width, expand_dim=hidden)
    raise UserError(f"The unit {unit!r} is unknown: use define or mlp.")


@torch.no_grad()
def start_as_projection(unit: DefineUnit | DenseMLP, projection: Tensor) -> Tensor:
    """Set a unit's weights so that it gives x @ projection, (n, m), with everything else ready to learn.

    A DeFINE unit's last layer has a skip connection from its input; in an MLP, gelu(x) - gelu(-x) = x carries it.
    Returns the weight of the last layer, which is linear.
    """
    n = len(projection)
    if isinstance(unit, DefineUnit):
        unit.last.weight.zero_()
        unit.last.weight[0, :n] = projection
        return unit.last.weight
    unit.reduce.weight.zero_()
    for sign, start in ((1.0, 0), (-1.0, n)):
        unit.expand.weight[start : start + n] = sign * torch.eye(n, device=projection.device)
        unit.expand.bias[start : start + n] = 0.0
        unit.reduce.weight[:, start : start + n] = sign * projection.T
    return unit.reduce.weight


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
    draws = RowDraws(weights, torch.Generator(device=wanted.device).manual_seed(fitting.seed))
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

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        training = replace(self.training, storage="float32" if budget.floats_only else "int4")

        def empty(quarter: int) -> Rows:
            config = unit_config(self.unit, 4 * quarter, width)
            made = UnitRows(stored_rows(torch.empty(rows, 4 * quarter), training.storage), config)
            made.unit.to(torch.float32 if budget.floats_only else torch.float16)
            return made

        map_dim = 4 * budget.largest(width // 4, empty)  # a multiple of 4, as the groups of a DeFINE unit need
        if map_dim:
            label = f"{'DeFINE' if self.unit == 'define' else 'MLP'} {map_dim}, {training.storage}"
            yield Candidate(label, partial(unit_table, unit=self.unit, map_dim=map_dim, fitting=training))
