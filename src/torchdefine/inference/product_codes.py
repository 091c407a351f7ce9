"""Product quantisation by k-means: the baseline for learnt codes."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.inference.codes import CodedRows

ROWS_AT_ONCE = 16_384
ITERATIONS = 25


@torch.no_grad()
def product_quantise_rows(
    matrix: Tensor,
    parts: int,
    entries: int = 256,
    weights: Tensor | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CodedRows:
    """Cut rows into ``parts``, and let k-means find the entries of each.

    ``weights`` say how much each row counts. The result depends on ``seed`` alone.
    """
    CodedRows(1, matrix.shape[1], parts, 1, entries)  # refuses sizes that do not fit, before the work
    if len(matrix) < entries:
        raise UserError(f"{len(matrix)} rows are too few for {entries} entries: use fewer entries.")
    chunks = matrix.float().unflatten(1, (parts, -1)).transpose(0, 1).contiguous()  # (parts, V, chunk)
    generator = torch.Generator(device=matrix.device).manual_seed(seed)
    book, codes = _k_means(chunks, entries, weights, generator, progress)
    return CodedRows.of(codes.T.unsqueeze(-1), book.unsqueeze(1))


def _k_means(
    points: Tensor, entries: int, weights: Tensor | None, generator: torch.Generator, progress: Progress | None
) -> tuple[Tensor, Tensor]:
    """(parts, V, chunk) → entries (parts, K, chunk) and codes (parts, V)."""
    count = points.shape[1]
    mass = torch.ones(count, device=points.device) if weights is None else weights.float()
    chosen = torch.multinomial(mass.clamp(min=1e-12), entries, generator=generator)
    centres = points[:, chosen].clone()  # (parts, K, chunk)
    for iteration in range(ITERATIONS):
        codes = _nearest(points, centres)
        sums, masses = torch.zeros_like(centres), torch.zeros(centres.shape[:2], device=points.device)
        sums.scatter_add_(1, codes.unsqueeze(-1).expand_as(points), points * mass[:, None])
        masses.scatter_add_(1, codes, mass.expand_as(codes))
        strays = points[:, torch.randint(count, (entries,), device=points.device, generator=generator)]
        centres = torch.where((masses > 0).unsqueeze(-1), sums / masses.clamp(min=1e-12).unsqueeze(-1), strays)
        if progress:
            progress(iteration + 1, ITERATIONS)
    return centres, _nearest(points, centres)


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    norms = centres.square().sum(-1).unsqueeze(1)  # (parts, 1, K)
    chunks = points.split(ROWS_AT_ONCE, dim=1)
    return torch.cat([(norms - 2 * chunk @ centres.transpose(1, 2)).argmin(-1) for chunk in chunks], dim=1)
