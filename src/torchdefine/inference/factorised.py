"""Rows of few numbers that a projection, or a small network, turns into wide ones."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from torchdefine.config import to_plain
from torchdefine.embedding import DefineUnit, DenseMLP, UnitConfig
from torchdefine.errors import UserError
from torchdefine.inference.rows import Rows, rows_from_config

ROWS_AT_ONCE = 65_536


class FactorisedRows(Rows):
    """(V × r) times (r × m); either factor is any kind of rows."""

    kind = "factorised"

    def __init__(self, factor: Rows, projection: Rows) -> None:
        if factor.width != projection.num_rows:
            raise UserError(f"A factor {factor.width} wide does not fit a projection of {projection.num_rows} rows.")
        super().__init__(factor.num_rows, projection.width)
        self.factor, self.projection = factor, projection

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return self.factor(rows, dtype) @ self.projection.matrix(dtype)  # (…, r) → (…, m)

    def config(self) -> dict[str, Any]:
        return {"factor": self.factor.described(), "projection": self.projection.described()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(rows_from_config(config["factor"]), rows_from_config(config["projection"]))


class UnitRows(Rows):
    """(V × r) through a DeFINE unit or an MLP to (V × m)."""

    kind = "unit"

    def __init__(self, factor: Rows, unit: DefineUnit | DenseMLP) -> None:
        given, width = unit_widths(unit)
        if factor.width != given:
            raise UserError(f"A factor {factor.width} wide does not fit a unit that takes {given}.")
        super().__init__(factor.num_rows, width)
        self.factor, self.unit = factor, unit.requires_grad_(False)

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        x = self.factor(rows, next(self.unit.parameters()).dtype)  # (…, r)
        return self.unit(x).to(dtype)  # (…, m)

    def config(self) -> dict[str, Any]:
        return {"factor": self.factor.described(), "unit": _unit_config(self.unit)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(rows_from_config(config["factor"]), _unit_from_config(config["unit"]))


def unit_widths(unit: nn.Module) -> tuple[int, int]:
    """The widths of a unit's input and output."""
    if isinstance(unit, DefineUnit):
        return unit.plan.map_dim, unit.plan.layers[-1].output_width
    if isinstance(unit, DenseMLP):
        return unit.expand.in_features, unit.reduce.out_features
    raise UserError(f"A table's unit is a DefineUnit or a DenseMLP, not {type(unit).__name__}.")


def _unit_config(unit: DefineUnit | DenseMLP) -> dict[str, Any]:
    if isinstance(unit, DenseMLP):
        given, hidden, width = unit.expand.in_features, unit.expand.out_features, unit.reduce.out_features
        sizes = {"input_dim": given, "hidden_dim": hidden, "output_dim": width}
        return {"kind": "mlp", **sizes, "equalised": unit.equalised}
    return {"kind": "define", "map_dim": unit.plan.map_dim, "unit": to_plain(unit.config)}


def _unit_from_config(config: dict[str, Any]) -> DefineUnit | DenseMLP:
    settings = dict(config)
    kind = settings.pop("kind", None)
    if kind == "mlp":
        return DenseMLP(**settings)
    if kind == "define":
        return DefineUnit(settings["map_dim"], UnitConfig.read(settings["unit"], "unit"))
    raise UserError(f"The unit {kind!r} is unknown: use define or mlp.")


@torch.no_grad()
def principal_directions(matrix: Tensor, rank: int, weights: Tensor | None = None) -> Tensor:
    """The r directions that keep most of the (weighted) squares of the rows: (V, m) → (r, m), orthonormal.

    They are the right singular vectors of diag(√weights) · matrix, found through the m × m second moments, so that a
    table of ten million rows needs no more memory than a small one.
    """
    width = matrix.shape[1]
    if not 1 <= rank <= width:
        raise UserError(f"The rank {rank} does not fit a table {width} wide: use 1 to {width}.")
    moments = torch.zeros(width, width, dtype=torch.float64, device=matrix.device)
    for start in range(0, len(matrix), ROWS_AT_ONCE):
        chunk = matrix[start : start + ROWS_AT_ONCE].double()  # (rows, m)
        weighted = chunk if weights is None else chunk * weights[start : start + ROWS_AT_ONCE, None].double()
        moments += chunk.T @ weighted
    _, vectors = torch.linalg.eigh(moments)  # ascending
    return vectors.flip(-1)[:, :rank].T.to(matrix.dtype).contiguous()
