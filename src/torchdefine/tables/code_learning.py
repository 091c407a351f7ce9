"""Compositional codes learnt through a Gumbel-softmax (Shu & Nakayama, ICLR 2018), then refined.

An encoder gives each row a distribution over the entries of every codebook; a noisy sample of it, soft during
training, weighs the entries that are summed. At the end the likeliest codes are taken and refined, which removes a
good part of the remaining error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.tables.budget import Budget
from torchdefine.tables.codes import CodedRows, check_codes, refine_codes
from torchdefine.tables.compact_table import CompactTable, table_bytes
from torchdefine.tables.source import (
    ROWS_AT_ONCE,
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

MOST_CODEBOOKS = 64
"""Within a budget: learning more takes long, and the codebooks alone are large."""


@dataclass(frozen=True)
class CodeLearning:
    """How codes are learnt; all other settings follow from the table."""

    steps: int = 4_000
    batch_size: int = 512
    lr: float = 3e-3
    temperature: float = 1.0
    last_temperature: float = 0.4
    validate_every: int = 250
    patience: int = 4
    """Validations without a gain of 0.1 % before learning stops early."""
    rounds: int = 20
    """Of refinement afterwards, at most; 0 leaves the codes as they were learnt."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("rounds", 0), ("seed", 0)):
            if not least <= getattr(self, name) < 2**63:
                raise UserError(f"{name} of code learning is {getattr(self, name)}, but must be at least {least}.")


class CodeLearner(nn.Module):
    """Rows → relaxed one-hot codes → rows again."""

    def __init__(self, width: int, codebooks: int, entries: int) -> None:
        super().__init__()
        self.codebooks, self.entries = codebooks, entries
        hidden = max(codebooks * entries // 2, 1)
        self.hidden = nn.Linear(width, hidden)
        self.logits = nn.Linear(hidden, codebooks * entries)
        self.books = nn.Parameter(torch.randn(codebooks * entries, width) * codebooks**-0.5)

    def scores(self, rows: Tensor) -> Tensor:
        """(B, m) → (B, M, K) logarithms of unnormalised probabilities."""
        raw = self.logits(torch.tanh(self.hidden(rows)))
        return torch.log(F.softplus(raw) + 1e-8).unflatten(-1, (self.codebooks, self.entries))

    def forward(self, rows: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        scores = self.scores(rows)
        uniform = torch.rand(scores.shape, device=rows.device, generator=generator).clamp(1e-9, 1 - 1e-7)
        chosen = F.softmax((scores - torch.log(-torch.log(uniform))) / temperature, dim=-1)
        return chosen.flatten(-2) @ self.books  # (B, m)

    @torch.no_grad()
    def codes(self, rows: Tensor) -> Tensor:
        """(V, m) → (V, M), the likeliest."""
        return torch.cat([self.scores(chunk).argmax(-1) for chunk in rows.split(ROWS_AT_ONCE)])


def learn_code_rows(
    matrix: Tensor,
    codebooks: int = 32,
    entries: int = 16,
    *,
    learning: CodeLearning | None = None,
    weights: Tensor | None = None,
    progress: Progress | None = None,
) -> CodedRows:
    """M codebooks of K entries whose sums rebuild a matrix, where it is: CPU or GPU.

    ``weights`` say how much each row's squared error counts.
    """
    learning = learning or CodeLearning()
    scale = matrix.float().square().mean().sqrt()
    rows = matrix.float() / scale.clamp(min=1e-12)
    mass = torch.ones(len(rows), device=rows.device) if weights is None else weights.float() / weights.float().mean()
    refining = learning.steps // 2 if learning.rounds else 0  # its part of the progress
    total = learning.steps + refining
    with torch.random.fork_rng(devices=[]):  # its weights are drawn again, by the seed
        learner = CodeLearner(rows.shape[1], codebooks, entries)
    _learn(rows, mass, learner, learning, _part_of(progress, 0, learning.steps, total))
    books = (learner.books.detach() * scale).unflatten(0, (codebooks, entries))
    coded = CodedRows.of(learner.codes(rows), books)
    if learning.rounds:
        report = _part_of(progress, learning.steps, refining, total)
        coded = refine_codes(matrix, coded, weights=mass, rounds=learning.rounds, seed=learning.seed, progress=report)
    if progress:
        progress(total, total)
    return coded


def _learn(rows: Tensor, mass: Tensor, learner: CodeLearner, learning: CodeLearning, progress: Progress | None) -> None:
    """Train the learner, in place, and keep the state with the least error of its hard codes."""
    device_generator = torch.Generator(device=rows.device).manual_seed(learning.seed)
    _start(learner, learning.seed)
    learner.to(rows.device)
    optimizer = torch.optim.Adam(learner.parameters(), lr=learning.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, learning.steps)
    draws = RowDraws(mass / len(rows), device_generator)
    held = torch.randperm(len(rows), device=rows.device, generator=device_generator)[:4_096]
    best, best_error, waited = learner.state_dict(), math.inf, 0
    for step in range(learning.steps):
        cooled = step / learning.steps
        temperature = learning.temperature * (learning.last_temperature / learning.temperature) ** cooled
        batch = draws.draw(learning.batch_size)
        error = (learner(rows[batch], temperature, device_generator) - rows[batch]).square().mean(-1)
        loss = (error * draws.left[batch]).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % learning.validate_every == 0 or step + 1 == learning.steps:
            error_now = _hard_error(learner, rows[held], mass[held])
            if error_now < best_error * 0.999:
                best = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
                best_error, waited = error_now, 0
            else:
                waited += 1
            if progress:
                progress(step + 1, learning.steps)
            if waited >= learning.patience:
                break
    learner.load_state_dict(best)


@torch.no_grad()
def _hard_error(learner: CodeLearner, rows: Tensor, mass: Tensor) -> float:
    one_hot = F.one_hot(learner.codes(rows), learner.entries).float().flatten(-2)
    return float(((one_hot @ learner.books - rows).square().mean(-1) * mass).mean())


@torch.no_grad()
def _start(learner: CodeLearner, seed: int) -> None:
    """The same first weights for the same seed, whatever else has drawn numbers before."""
    generator = torch.Generator().manual_seed(seed)
    for linear in (learner.hidden, learner.logits):
        nn.init.xavier_uniform_(linear.weight, generator=generator)
        nn.init.zeros_(linear.bias)
    nn.init.normal_(learner.books, std=learner.codebooks**-0.5, generator=generator)


def _part_of(progress: Progress | None, before: int, part: int, total: int) -> Progress | None:
    """Progress of a part of the work, as progress of the whole."""
    if progress is None:
        return None
    return lambda done, of: progress(before + part * done // max(of, 1), total)


def coded_table(
    table: TableLike,
    codebooks: int = 32,
    entries: int = 16,
    *,
    counts: Counts | None = None,
    learning: CodeLearning | None = None,
    padding_idx: int | None = None,
    progress: Progress | None = None,
) -> CompactTable:
    """Compositional codes: each row is a sum of one entry from each codebook."""
    check_codes(codebooks, entries)
    matrix = as_matrix(table)
    weights = None if counts is None else as_weights(counts, matrix)
    rows, mean = centred(matrix, weights)
    coded = learn_code_rows(rows, codebooks, entries, learning=learning, weights=weights, progress=progress)
    return CompactTable(coded, mean, padding_idx)


@dataclass(frozen=True)
class Codes(Method):
    """As many codebooks as fit; ``codebooks`` of them where nobody gives a budget."""

    codebooks: int = 32
    entries: int = 16
    training: CodeLearning = field(default_factory=CodeLearning)

    def __post_init__(self) -> None:
        check_codes(self.codebooks, self.entries)

    def within(self, source: Source, budget: Budget) -> Iterator[Candidate]:
        rows, width = source.matrix.shape
        most = max(MOST_CODEBOOKS, self.codebooks)
        books = budget.largest(most, lambda books: table_bytes(CodedRows, rows, width, books, self.entries))
        if books and rows >= self.entries and not budget.floats_only:
            make = partial(coded_table, source.matrix, books, self.entries, learning=self.training)
            yield candidate(f"codes {books} × {self.entries}", source, make, reports=True)

    def usual_bytes(self, rows: int, width: int) -> int:
        return table_bytes(CodedRows, rows, width, self.codebooks, self.entries)
