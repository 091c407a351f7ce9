"""What tools make of a token table at a number of bytes: a matrix, and the bytes that it takes packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdefine.tables import CompactTable, transform_table
from torchdefine.tables.budget import Budget
from torchdefine.tables.low_rank import LowRank
from torchdefine.tables.source import Source

GROUP = 32


@dataclass(frozen=True)
class Packed:
    """A table after a round trip through few bytes."""

    matrix: Tensor
    bytes: int


Contestant = Callable[[Source, int], Packed | None]
"""Packs a table into a number of bytes, if there is a way that fits."""


def unpacked(table: CompactTable) -> Packed:
    """A table of ours, at the bytes that its tensors have, as those of others are counted; a file's header is extra."""
    return Packed(table(torch.arange(table.num_embeddings)).detach(), table.stored_bytes)


def torchao_bits(matrix: Tensor, bits: int) -> Packed:
    """A matrix rounded by torchao with a float16 scale and a zero point a group, and its bytes if codes are packed."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    width = matrix.shape[1]
    group = width if bits == 8 else GROUP
    block, top = (1, group), 2**bits - 1
    limits = {"quant_min": 0, "quant_max": top}
    wide = torch.nn.functional.pad(matrix, (0, -width % group))
    scale, zero = choose_qparams_affine(
        wide, MappingType.ASYMMETRIC, block, torch.uint8, **limits, scale_dtype=torch.float32
    )
    scale = scale.half().float()
    codes = quantize_affine(wide, block, scale, zero, torch.uint8, **limits)
    back = dequantize_affine(codes, block, scale, zero, torch.uint8, **limits)[:, :width]
    return Packed(back, matrix.numel() * bits // 8 + scale.numel() * 2 + -(-zero.numel() * bits // 8))


def bytes_of_int4(width: int) -> int:
    """Of a row, with its scales and zero points."""
    groups = -(-width // GROUP)
    return width // 2 + groups * 5 // 2


def product_quantised(source: Source, size: int) -> Packed | None:
    """faiss's product quantiser with codebooks of 256, as float32 as faiss has them."""
    import faiss

    rows, width = source.matrix.shape
    fitting = [m for m in range(1, width + 1) if width % m == 0 and rows * m + 4 * 256 * width <= size]
    if not fitting:
        return None
    quantiser = faiss.ProductQuantizer(width, fitting[-1], 8)
    numbers = source.matrix.numpy()
    quantiser.train(numbers)
    back = torch.from_numpy(quantiser.decode(quantiser.compute_codes(numbers)))
    return Packed(back, rows * fitting[-1] + 4 * 256 * width)


def pca_int8(source: Source, size: int) -> Packed | None:
    """PCA as model2vec reduces a table, with its int8 for the coefficients."""
    rows, width = source.matrix.shape
    taken = 4 * width + 4 * rows
    rank = min((size - taken) // (rows + 4 * width), width)
    if rank < 1:
        return None
    mean = source.matrix.double().mean(0)
    centred = source.matrix - mean
    directions = torch.linalg.svd(centred, full_matrices=False)[2][:rank]
    coefficients = (centred @ directions.T).float()
    scale = coefficients.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    back = (coefficients / scale).round() * scale @ directions.float() + mean.float()
    return Packed(back, taken + rank * (rows + 4 * width))


def svd_four_bits(source: Source, size: int) -> Packed | None:
    """The highest rank that fits, weighted by counts, in 4 bits a coefficient with a scale for each 32 of them."""
    candidates = {one.label.split()[-1]: one for one in LowRank().within(*source.matrix.shape, Budget(size))}
    chosen = candidates.get("int4")
    return unpacked(chosen.build(source)) if chosen else None


def ours(source: Source, size: int) -> Packed:
    return unpacked(transform_table(source, size))


OTHERS: dict[str, Contestant] = {
    "faiss product quantisation": product_quantised,
    "SVD by counts, 4 bits": svd_four_bits,
    "PCA as model2vec, int8": pca_int8,
}


def of_a_size_of_their_own(matrix: Tensor) -> Iterator[tuple[str, Callable[[], Packed]]]:
    yield "full", lambda: Packed(matrix, 4 * matrix.numel())
    for bits in (8, 4, 2):
        yield f"torchao int{bits}", lambda bits=bits: torchao_bits(matrix, bits)
