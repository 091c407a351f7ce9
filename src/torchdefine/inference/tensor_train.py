"""Rows as a tensor train: V and m are split into factors, and a chain of small cores gives any row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.errors import UserError
from torchdefine.inference.rows import Rows, float_type, frozen

ORDER = 3
"""Cores of a train."""


class TensorTrainRows(Rows):
    """Core i has the shape (rank before, row factor, width factor, rank after); a row is a product of matrices."""

    kind = "tensor-train"

    def __init__(
        self,
        num_rows: int,
        row_factors: list[int],
        width_factors: list[int],
        ranks: list[int],
        dtype: str = "float32",
    ) -> None:
        super().__init__(num_rows, math.prod(width_factors))
        if math.prod(row_factors) < num_rows or not len(ranks) - 1 == len(row_factors) == len(width_factors):
            raise UserError(
                f"The factors {row_factors} and {width_factors} with the ranks {ranks} do not hold {num_rows} rows."
            )
        self.row_factors, self.width_factors, self.ranks, self.dtype = row_factors, width_factors, ranks, dtype
        shapes = zip(ranks[:-1], row_factors, width_factors, ranks[1:], strict=True)
        self.cores = nn.ParameterList(frozen(torch.zeros(*shape, dtype=float_type(dtype))) for shape in shapes)

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        flat = rows.reshape(-1)  # (T,)
        left, wide = math.prod(self.row_factors), 1
        state = torch.ones(1, 1, 1, dtype=dtype, device=rows.device)  # (T, width so far, rank)
        for factor, more, core in zip(self.row_factors, self.width_factors, self.cores, strict=True):
            left, wide = left // factor, wide * more
            digit = (flat // left) % factor
            slices = core.to(dtype).transpose(0, 1)[digit]  # (T, rank before, width factor, rank after)
            grown = state @ slices.flatten(2)  # (T, width so far, width factor × rank after)
            state = grown.reshape(-1, wide, core.shape[-1])
        return state.reshape(*rows.shape, self.width)

    def config(self) -> dict[str, Any]:
        names = ("num_rows", "row_factors", "width_factors", "ranks", "dtype")
        return {name: getattr(self, name) for name in names}


@torch.no_grad()
def tensor_train_rows(matrix: Tensor, rank: int) -> TensorTrainRows:
    """Decompose a matrix by truncated singular values along the train (tensorly-torch); ranks up to ``rank``."""
    try:
        from tltorch import TensorizedTensor
    except ImportError:
        raise UserError("A tensor train needs the package tensorly-torch: pip install 'torchdefine[tt]'.") from None
    num_rows, width = matrix.shape
    row_factors, width_factors, ranks = train_shape(num_rows, width, rank)
    padded = torch.zeros(math.prod(row_factors), width, device=matrix.device)
    padded[:num_rows] = matrix.float()
    shape = (tuple(row_factors), tuple(width_factors))
    train = TensorizedTensor.from_matrix(padded, *shape, rank=tuple(ranks), factorization="blocktt")
    cores = [core.detach() for core in train.factors]
    made = TensorTrainRows(num_rows, row_factors, width_factors, [core.shape[0] for core in cores] + [1])
    made.cores = nn.ParameterList(frozen(core.float().clone()) for core in cores)
    return made


def train_shape(num_rows: int, width: int, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Factors of the rows and of the width, and the ranks between them, none larger than ``rank``."""
    row_factors, width_factors = _factors_of_at_least(num_rows, ORDER), _divisors(width, ORDER)
    sizes = [a * b for a, b in zip(row_factors, width_factors, strict=True)]
    cuts = [min(math.prod(sizes[:i]), math.prod(sizes[i:]), rank) for i in range(1, len(sizes))]
    return row_factors, width_factors, [1, *cuts, 1]


def _factors_of_at_least(number: int, order: int) -> list[int]:
    """``order`` nearly equal factors, each rounded up, whose product is at least ``number``."""
    factors = []
    for left in range(order, 0, -1):
        factor = math.ceil(round(number ** (1 / left), 9))
        factors.append(factor)
        number = -(-number // factor)
    return factors


def _divisors(number: int, order: int) -> list[int]:
    """``order`` factors whose product is ``number``, as equal as its divisors allow."""
    factors = []
    for left in range(order, 1, -1):
        wanted = number ** (1 / left)
        factor = min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(math.log(d / wanted)))
        factors.append(factor)
        number //= factor
    return [*factors, number]
