"""Compositional codes: a row is a sum of one entry from each of some small codebooks (Shu & Nakayama, ICLR 2018).

An encoder learns, through a Gumbel-softmax, a distribution over the entries of every codebook for each row; a noisy
sample of it, soft during training, weighs the entries that are summed. At the end the likeliest codes are taken and
refined, which removes a good part of the remaining error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import Config, setting
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.ops import only_values
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable, table_bytes
from torchdefine.tables.fields import pack, packed_width, unpack
from torchdefine.tables.rows import FLOATS, Rows, frozen, stored_as
from torchdefine.tables.source import Candidate, Method, RowDraws, Source, TableLike, centred

MOST_CODEBOOKS = 64
"""Within a budget: learning more takes long, and the codebooks alone are large."""
MOST_ENTRIES = 8192
"""Of all codebooks together, which are solved for at once."""
ROWS_AT_ONCE = 8_192
PASSES = 2
SHAKEN = 3
RIDGE = 1e-4
LEAST_GAIN = 1e-3
"""A round that lowers the error by a smaller fraction is the last."""


class CodedRows(Rows):
    """``books`` codebooks of ``entries`` vectors each; codes are packed: 4 bits for 16 entries."""

    kind = "codes"
    refuses = True

    def __init__(self, num_rows: int, width: int, books: int, entries: int, dtype: str = "float16") -> None:
        super().__init__(num_rows, width)
        self.books, self.entries, self.dtype = books, entries, dtype
        self.own_codes, self.bits = num_rows * books, entries.bit_length() - 1
        self.codes: Tensor = nn.Buffer(torch.zeros(num_rows, packed_width(books, self.bits), dtype=torch.uint8))
        self.codebooks = frozen(torch.zeros(books, entries, width, dtype=FLOATS[dtype]))

    @classmethod
    def of(cls, codes: Tensor, codebooks: Tensor, dtype: str = "float16") -> CodedRows:
        """From codes (V, M) and codebooks (M, K, width)."""
        books, entries, width = codebooks.shape
        made = cls(len(codes), width, books, entries, dtype)
        made.codes = pack(codes, made.bits)
        made.codebooks = frozen(stored_as(codebooks, FLOATS[dtype]).clone())
        return made

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        codes = unpack(torch.embedding(self.codes, rows), self.bits, self.books)  # (…, M)
        entries = codes + torch.arange(0, self.books * self.entries, self.entries, device=codes.device)
        books = self.constant(lambda: self.codebooks.flatten(0, 1).to(dtype), dtype, self.codebooks)  # (M K, width)
        if books.dtype is torch.float32 and books.device.type == "cpu" and only_values(books):
            return F.embedding_bag(entries.view(-1, self.books), books, mode="sum").view(*rows.shape, self.width)
        return F.embedding(entries, books).sum(-2)  # (…, width)

    def unpacked(self) -> Tensor:
        """All codes, (V, M)."""
        return unpack(self.codes, self.bits, self.books).long()


@dataclass(frozen=True)
class CodeLearning(Config):
    """How codes are learnt; all other settings follow from the table."""

    steps: int = setting(4_000, "Steps of learning, at most.", at_least=1)
    batch_size: int = 512
    lr: float = 3e-3
    temperature: float = 1.0
    last_temperature: float = 0.4
    validate_every: int = 250
    patience: int = setting(4, "Validations without a gain of 0.1 % before learning stops early.")
    rounds: int = setting(20, "Of refinement afterwards, at most; 0 leaves the codes as they were learnt.", at_least=0)
    seed: int = setting(0, "Of all random choices.", at_least=0, below=2**63)


def coded_table(
    table: TableLike | Source,
    codebooks: int = 32,
    entries: int = 16,
    learning: CodeLearning | None = None,
    **known: Any,
) -> CompactTable:
    """Compositional codes: each row is a sum of one entry from each codebook."""
    check_codes(codebooks, entries)
    source = Source.of(table, **known)
    weights = None if source.counts is None else source.weights()
    rows, mean = centred(source.matrix, weights)
    coded = learn_code_rows(rows, codebooks, entries, learning=learning, weights=weights, progress=source.progress)
    return CompactTable(coded, mean, source.padding_idx)


def check_codes(codebooks: int, entries: int) -> None:
    """Refuse codes that cannot be packed, and more of them than can be solved for at once."""
    if not (isinstance(entries, int) and 2 <= entries <= 256 and entries & (entries - 1) == 0):
        raise UserError(f"A codebook of {entries} entries cannot be packed: use a power of two from 2 to 256.")
    if not isinstance(codebooks, int) or not 1 <= codebooks <= MOST_ENTRIES // entries:
        most = f"1 to {MOST_ENTRIES // entries} codebooks of {entries}"
        raise UserError(f"codebooks is {codebooks!r}, but must be a whole number: use {most}.")


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
    learner = CodeLearner(rows.shape[1], codebooks, entries, learning.seed).to(rows.device)

    def report(done: int) -> None:
        if progress:
            progress(done, total)

    _learn(rows, mass, learner, learning, report)
    books = (learner.books.detach() * scale).unflatten(0, (codebooks, entries))
    coded = CodedRows.of(learner.codes(rows), books)
    if learning.rounds:
        coded = refine_codes(
            matrix,
            coded,
            weights=mass,
            rounds=learning.rounds,
            seed=learning.seed,
            progress=lambda done, rounds: report(learning.steps + refining * done // rounds),
        )
    report(total)
    return coded


class CodeLearner(nn.Module):
    """Rows → relaxed one-hot codes → rows again."""

    def __init__(self, width: int, codebooks: int, entries: int, seed: int) -> None:
        super().__init__()
        self.codebooks, self.entries = codebooks, entries
        hidden = max(codebooks * entries // 2, 1)
        self.hidden = nn.utils.skip_init(nn.Linear, width, hidden)  # draws no numbers of its own
        self.logits = nn.utils.skip_init(nn.Linear, hidden, codebooks * entries)
        self.books = nn.Parameter(torch.empty(codebooks * entries, width))
        generator = torch.Generator().manual_seed(seed)
        for linear in (self.hidden, self.logits):
            nn.init.xavier_uniform_(linear.weight, generator=generator)
            nn.init.zeros_(linear.bias)
        nn.init.normal_(self.books, std=codebooks**-0.5, generator=generator)

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
        return torch.cat([self.scores(chunk).argmax(-1) for chunk in rows.split(2 * ROWS_AT_ONCE)])

    @torch.no_grad()
    def error(self, rows: Tensor, mass: Tensor) -> float:
        """The weighted error of the likeliest codes."""
        one_hot = F.one_hot(self.codes(rows), self.entries).float().flatten(-2)
        return float(((one_hot @ self.books - rows).square().mean(-1) * mass).mean())


def _learn(
    rows: Tensor, mass: Tensor, learner: CodeLearner, learning: CodeLearning, report: Callable[[int], None]
) -> None:
    """Train the learner, in place, and keep the state with the least error of its hard codes."""
    generator = torch.Generator(device=rows.device).manual_seed(learning.seed)
    optimizer = torch.optim.Adam(learner.parameters(), lr=learning.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, learning.steps)
    draws = RowDraws(mass / len(rows), generator)
    held = torch.randperm(len(rows), device=rows.device, generator=generator)[:4_096]
    best, best_error, waited = learner.state_dict(), math.inf, 0
    for step in range(learning.steps):
        cooled = step / learning.steps
        temperature = learning.temperature * (learning.last_temperature / learning.temperature) ** cooled
        batch = draws.draw(learning.batch_size)
        error = (learner(rows[batch], temperature, generator) - rows[batch]).square().mean(-1)
        loss = (error * draws.left[batch]).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % learning.validate_every == 0 or step + 1 == learning.steps:
            error_now = learner.error(rows[held], mass[held])
            if error_now < best_error * 0.999:
                best = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
                best_error, waited = error_now, 0
            else:
                waited += 1
            report(step + 1)
            if waited >= learning.patience:
                break
    learner.load_state_dict(best)


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

    A round solves for all entries at once, then goes through the codebooks and lets every row choose again, once from
    its present codes and once after some of them were replaced at random; the better of the two stays. Given the
    entries, no round makes a row's error larger.
    """
    generator = torch.Generator(device=matrix.device).manual_seed(seed)
    rows = matrix.float()
    codes = coded.unpacked()  # (V, M)
    books = coded.codebooks.float().clone()  # (M, K, m)
    mass = torch.ones(len(matrix), device=matrix.device) if weights is None else weights.float()
    before = torch.inf
    for round_number in range(rounds):
        books = best_entries(rows, codes, books, mass)
        error = _choose_again(rows, codes, books, mass, generator)
        if progress:
            progress(round_number + 1, rounds)
        if before - error < LEAST_GAIN * error:
            break
        before = error
    return CodedRows.of(codes, best_entries(rows, codes, books, mass), coded.dtype)


def best_entries(points: Tensor, codes: Tensor, books: Tensor, mass: Tensor) -> Tensor:
    """The entries with the least error for given codes: a ridge regression of the rows on their codes, in float64.

    The ridge pulls towards the entries so far, so one that no row uses stays as it is.
    """
    count, entries, width = books.shape
    total = count * entries
    both = torch.zeros(total, total, dtype=torch.float64, device=points.device)
    towards = torch.zeros(total, width, dtype=torch.float64, device=points.device)
    old = books.flatten(0, 1).double()
    for start in range(0, len(points), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        chosen = F.one_hot(codes[here], entries).flatten(1).float()  # (rows, M K)
        weighted = chosen * mass[here, None]
        both += (chosen.T @ weighted).double()
        towards += (weighted.T @ points[here]).double()
    ridge = RIDGE * both.diagonal().mean().clamp(min=1e-12)
    solved = torch.linalg.solve(both + ridge * torch.eye(total, device=both.device), towards + ridge * old)
    return solved.to(books.dtype).unflatten(0, (count, entries))


def _choose_again(points: Tensor, codes: Tensor, books: Tensor, mass: Tensor, generator: torch.Generator) -> float:
    """Better codes for every row, in place; returns the weighted squared error that remains."""
    count, entries = books.shape[:2]
    flat = books.flatten(0, 1)  # (M K, m)
    gram = flat @ flat.T
    remaining = torch.zeros((), dtype=torch.float64, device=points.device)
    for start in range(0, len(points), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        scores = points[here] @ flat.T  # (rows, M K)
        chosen, cost = _descend(scores, codes[here], gram, entries)
        shaken = codes[here].clone()
        which = torch.randint(count, (len(shaken), SHAKEN), device=points.device, generator=generator)
        drawn = torch.randint(entries, which.shape, device=points.device, generator=generator)
        other, other_cost = _descend(scores, shaken.scatter_(1, which, drawn), gram, entries)
        codes[here] = torch.where((other_cost < cost).unsqueeze(-1), other, chosen)
        errors = (points[here].square().sum(-1) + torch.minimum(cost, other_cost)).clamp(min=0)
        remaining += (errors * mass[here]).sum(dtype=torch.float64)
    return float(remaining)


def _descend(scores: Tensor, codes: Tensor, gram: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Choose one code after another, the others fixed; returns codes and their costs |sum|² - 2 row · sum.

    The products of all pairs of entries (``gram``) and of rows and entries (``scores``) suffice; no vector is needed.
    """
    count = codes.shape[1]
    norms = gram.diagonal()
    chosen = codes + torch.arange(0, count * entries, entries, device=codes.device)
    reach = torch.zeros_like(scores)  # products of the chosen sum with every entry
    for book in range(count):
        reach += gram[chosen[:, book]]
    for _ in range(PASSES):
        for book in range(count):
            block = slice(book * entries, (book + 1) * entries)
            old = chosen[:, book]
            others = reach[:, block] - gram[old, block]
            new = (norms[block] + 2 * (others - scores[:, block])).argmin(-1) + book * entries
            reach += gram[new] - gram[old]
            chosen[:, book] = new
    cost = (torch.gather(reach, 1, chosen) - 2 * torch.gather(scores, 1, chosen)).sum(-1)
    return chosen % entries, cost


@dataclass(frozen=True)
class Codes(Method):
    """As many codebooks as fit; ``codebooks`` of them where nobody gives a budget."""

    codebooks: int = 32
    entries: int = 16
    training: CodeLearning = field(default_factory=CodeLearning)

    def __post_init__(self) -> None:
        check_codes(self.codebooks, self.entries)

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        most = max(MOST_CODEBOOKS, self.codebooks)
        books = budget.largest(most, lambda books: CodedRows(rows, width, books, self.entries))
        if books and rows >= self.entries and not budget.floats_only:
            make = partial(coded_table, codebooks=books, entries=self.entries, learning=self.training)
            yield Candidate(f"codes {books} × {self.entries}", make)

    def usual_bytes(self, rows: int, width: int) -> int:
        return table_bytes(partial(CodedRows, rows, width, self.codebooks, self.entries))
