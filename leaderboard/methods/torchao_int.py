"""torchao's affine integers: 8 bits with a scale a row; 4 and 2 bits with a scale for each 32 numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderboard.board import Method, Packed, Table

GROUP = 32
BITS = (8, 4, 2)


def rounded(matrix: Tensor, bits: int) -> Packed:
    """A matrix rounded with a float16 scale and a zero point a group, and its bytes if codes are packed."""
    from torchao.quantization.quant_primitives import (  # type: ignore[import-untyped]
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    rows, width = matrix.shape
    group = width if bits == 8 else GROUP
    block, limits = (1, group), {"quant_min": 0, "quant_max": 2**bits - 1}
    wide = torch.nn.functional.pad(matrix, (0, -width % group))
    scale, zero = choose_qparams_affine(
        wide, MappingType.ASYMMETRIC, block, torch.uint8, **limits, scale_dtype=torch.float32
    )
    scale = scale.half().float()
    codes = quantize_affine(wide, block, scale, zero, torch.uint8, **limits)
    back = dequantize_affine(codes, block, scale, zero, torch.uint8, **limits)[:, :width]
    return Packed(back, bytes_of(rows, width, bits), f"int{bits}")


def bytes_of(rows: int, width: int, bits: int) -> int:
    """Codes, float16 scales and zero points."""
    groups = rows * (1 if bits == 8 else -(-width // GROUP))
    return rows * width * bits // 8 + 2 * groups - (-groups * bits // 8)


def own_sizes(table: Table) -> list[int]:
    rows, width = table.source.matrix.shape
    return [bytes_of(rows, width, bits) for bits in BITS]


def pack(table: Table, budget: int) -> Packed | None:
    """The most bits that fit."""
    fitting = [bits for bits, size in zip(BITS, own_sizes(table), strict=True) if size <= budget]
    return rounded(table.source.matrix, fitting[0]) if fitting else None


METHOD = Method(
    "torchao",
    pack,
    {"group": {"8": "a row", "4": GROUP, "2": GROUP}, "mapping": "asymmetric", "scale": "float16"},
    ("torchao",),
    sizes=own_sizes,
)
