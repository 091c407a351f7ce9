"""Improving codes: every row chooses each code again given its others, then least squares give the entries."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdefine.files import Progress
from torchdefine.inference.codes import CodedRows

ROWS_AT_ONCE = 8_192
PASSES = 2
SHAKEN = 3
RIDGE = 1e-4
LEAST_GAIN = 1e-3
"""A round that lowers the error by a smaller share is the last."""


@torch.no_grad()
def refine_codes(
    matrix: Tensor,
    coded: CodedRows,
    *,
    weights: Tensor | None = None,
    rounds: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> CodedRows:
    """Lower the (weighted) squared error of coded rows, round by round, until one gains too little.

    A round solves for all entries of a part at once, then goes through its codebooks and lets every row choose again,
    once from its present codes and once after some of them were replaced at random; the better of the two stays. Given
    the entries, no round makes a row's error larger.
    """
    generator = torch.Generator(device=matrix.device).manual_seed(seed)
    chunks = matrix.float().unflatten(1, (coded.parts, -1)).transpose(0, 1)  # (parts, V, chunk)
    codes = coded.unpacked().transpose(0, 1).clone()  # (parts, V, stages)
    books = coded.codebooks.float().clone()  # (parts, stages, K, chunk)
    mass = torch.ones(len(matrix), device=matrix.device) if weights is None else weights.float()
    before = torch.inf
    for round_number in range(rounds):
        error = 0.0
        for part in range(coded.parts):
            books[part] = best_entries(chunks[part], codes[part], books[part], mass)
            error += _choose_again(chunks[part], codes[part], books[part], mass, generator)
        if progress:
            progress(round_number + 1, rounds)
        if before - error < LEAST_GAIN * error:
            break
        before = error
    for part in range(coded.parts):
        books[part] = best_entries(chunks[part], codes[part], books[part], mass)
    if progress:
        progress(rounds, rounds)
    return CodedRows.of(codes.transpose(0, 1), books, coded.dtype)


def best_entries(points: Tensor, codes: Tensor, books: Tensor, mass: Tensor) -> Tensor:
    """The entries with the least error for given codes: a ridge regression of the rows on their codes, in float64.

    The ridge pulls towards the entries so far, so one that no row uses stays as it is.
    """
    stages, entries, chunk = books.shape
    total = stages * entries
    offsets = torch.arange(0, total, entries, device=codes.device)
    both = torch.zeros(total, total, dtype=torch.float64, device=points.device)
    towards = torch.zeros(total, chunk, dtype=torch.float64, device=points.device)
    old = books.flatten(0, 1).double()
    for start in range(0, len(points), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        chosen = torch.zeros(len(points[here]), total, device=points.device)
        chosen.scatter_(1, codes[here] + offsets, 1.0)  # (rows, M K) of zeros and ones
        weighted = chosen * mass[here, None]
        both += (chosen.T @ weighted).double()
        towards += (weighted.T @ points[here]).double()
    ridge = RIDGE * both.diagonal().mean().clamp(min=1e-12)
    solved = torch.linalg.solve(both + ridge * torch.eye(total, device=both.device), towards + ridge * old)
    return solved.to(books.dtype).unflatten(0, (stages, entries))


def _choose_again(points: Tensor, codes: Tensor, books: Tensor, mass: Tensor, generator: torch.Generator) -> float:
    """Better codes for every row, in place; returns the weighted squared error that remains."""
    stages, entries = books.shape[:2]
    flat = books.flatten(0, 1)  # (M K, chunk)
    gram = flat @ flat.T
    remaining = torch.zeros((), dtype=torch.float64, device=points.device)
    for start in range(0, len(points), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        scores = points[here] @ flat.T  # (rows, M K)
        chosen, cost = _descend(scores, codes[here], gram, entries)
        if stages > 1:
            shaken = codes[here].clone()
            which = torch.randint(stages, (len(shaken), SHAKEN), device=points.device, generator=generator)
            drawn = torch.randint(entries, which.shape, device=points.device, generator=generator)
            other, other_cost = _descend(scores, shaken.scatter_(1, which, drawn), gram, entries)
            better = other_cost < cost
            chosen = torch.where(better.unsqueeze(-1), other, chosen)
            cost = torch.minimum(cost, other_cost)
        codes[here] = chosen
        errors = (points[here].square().sum(-1) + cost).clamp(min=0)
        remaining += (errors * mass[here]).sum(dtype=torch.float64)
    return float(remaining)


def _descend(scores: Tensor, codes: Tensor, gram: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Choose one code after another, the others fixed; returns codes and their costs |sum|² - 2 row · sum.

    The products of all pairs of entries (``gram``) and of rows and entries (``scores``) suffice; no vector is needed.
    """
    stages = codes.shape[1]
    norms = gram.diagonal()
    chosen = codes + torch.arange(0, stages * entries, entries, device=codes.device)
    reach = torch.zeros_like(scores)  # products of the chosen sum with every entry
    for stage in range(stages):
        reach += gram[chosen[:, stage]]
    for _ in range(PASSES if stages > 1 else 1):
        for stage in range(stages):
            block = slice(stage * entries, (stage + 1) * entries)
            old = chosen[:, stage]
            others = reach[:, block] - gram[old, block]
            new = (norms[block] + 2 * (others - scores[:, block])).argmin(-1) + stage * entries
            if stages > 1:
                reach += gram[new] - gram[old]
            chosen[:, stage] = new
    if stages == 1:
        reach = gram[chosen[:, 0]]
    cost = (torch.gather(reach, 1, chosen) - 2 * torch.gather(scores, 1, chosen)).sum(-1)
    return chosen % entries, cost
