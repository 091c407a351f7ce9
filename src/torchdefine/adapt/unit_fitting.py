"""A DeFINE unit, or an MLP, over a small table, fitted to a finished one; both start as its weighted SVD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.embedding import DefineUnit, DenseMLP, UnitConfig
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.inference import CompactTable, UnitRows
from torchdefine.inference.factorised import principal_directions
from torchdefine.inference.quantised import stored_rows
from torchdefine.inference.row_draws import RowDraws
from torchdefine.inference.rows import DenseRows
from torchdefine.inference.tables import Counts, TableLike, as_matrix, as_weights, centred
from torchdefine.inference.transform import metric

DEPTH = 3


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
    felt, back = metric(sensitivity, rows)
    with torch.random.fork_rng([]):  # leaves the caller's random state alone
        torch.default_generator.manual_seed(fitting.seed)  # only the CPU's, where the unit is drawn
        made = make_unit(unit, map_dim, rows.shape[1]).to(rows.device)
    directions = principal_directions(rows @ felt, map_dim, weights)  # (n, m)
    coefficients = rows @ felt @ directions.T  # (V, n)
    scale = coefficients.square().mean(0).sqrt().clamp(min=1e-7)
    size = rows.square().mean().sqrt().clamp(min=1e-7)  # learning rates are for vectors of unit size
    start_as_projection(made, scale[:, None] * directions @ back / size)
    small = nn.Parameter(coefficients / scale)
    _train(small, made, rows / size @ felt, felt, weights, fitting, progress)
    with torch.no_grad():
        last_weight(made).mul_(size)
    factor = stored_rows(small.detach(), fitting.storage)
    if not isinstance(factor, DenseRows):
        made.half()
    elif fitting.storage != "float32":
        made.to(factor.weight.dtype)
    return CompactTable(UnitRows(factor, made), mean, padding_idx)


def make_unit(unit: str, map_dim: int, width: int) -> DefineUnit | DenseMLP:
    """The unit of a candidate: hidden layers as wide as the finished vectors, or twice the map where that is more."""
    hidden = max(width, 2 * map_dim)
    if unit == "define":
        return DefineUnit(map_dim, UnitConfig(embedding_dim=width, expand_dim=-(-hidden // 4) * 4, depth=DEPTH))
    if unit == "mlp":
        return DenseMLP(map_dim, hidden, width)
    raise UserError(f"The unit {unit!r} is unknown: use define or mlp.")


@torch.no_grad()
def start_as_projection(unit: DefineUnit | DenseMLP, projection: Tensor) -> None:
    """Set a unit's weights so that it gives x @ projection, (n, m), with everything else ready to learn.

    A DeFINE unit's last layer sees its input again; in an MLP, gelu(x) - gelu(-x) = x carries it through.
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
    """The weight of the layer, linear and without bias, that gives the finished vectors."""
    return unit.last.weight if isinstance(unit, DefineUnit) else unit.reduce.weight


def _train(
    small: nn.Parameter,
    unit: nn.Module,
    wanted: Tensor,
    felt: Tensor,
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
        error = unit(small[batch]) @ felt - wanted[batch]  # (B, m)
        loss = (error.square().sum(-1) * draws.left[batch]).mean() / variance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if progress and ((step + 1) % 20 == 0 or step + 1 == fitting.steps):
            progress(step + 1, fitting.steps)
    unit.requires_grad_(False)
