"""Compositional codes: a row is a sum of one entry from each of some small codebooks."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.tables.rows import Rows, float_type, frozen, pack, packed_width, stored_as, unpack

ROWS_AT_ONCE = 8_192
MOST_ENTRIES = 8192
"""Of all codebooks together, which are solved for at once."""
PASSES = 2
SHAKEN = 3
RIDGE = 1e-4
LEAST_GAIN = 1e-3
"""A round that lowers the error by a smaller fraction is the last."""


class CodedRows(Rows):
    """Codes of Shu and Nakayama: ``books`` of ``entries`` vectors each. Codes are packed: 4 bits for 16 entries."""

    kind = "codes"
    settings = ("num_rows", "width", "books", "entries", "dtype")

    def __init__(self, num_rows: int, width: int, books: int, entries: int, dtype: str = "float16") -> None:
        super().__init__(num_rows, width)
        self.books, self.entries, self.dtype = books, entries, dtype
        self.own_codes, self.bits = num_rows * books, entries.bit_length() - 1
        self.register_buffer("codes", torch.zeros(num_rows, packed_width(books, self.bits), dtype=torch.uint8))
        self.codes: Tensor
        self.codebooks = frozen(torch.zeros(books, entries, width, dtype=float_type(dtype)))

    @classmethod
    def of(cls, codes: Tensor, codebooks: Tensor, dtype: str = "float16") -> CodedRows:
        """From codes (V, M) and codebooks (M, K, width)."""
        books, entries, width = codebooks.shape
        made = cls(len(codes), width, books, entries, dtype)
        made.codes = pack(codes, made.bits)
        made.codebooks = frozen(stored_as(codebooks, float_type(dtype)).clone())
        return made

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        codes = unpack(self.codes[rows], self.bits, self.books).long()  # (…, M)
        entries = codes + torch.arange(0, self.books * self.entries, self.entries, device=codes.device)
        return torch.nn.functional.embedding(entries, self.codebooks.flatten(0, 1).to(dtype)).sum(-2)  # (…, width)

    def unpacked(self) -> Tensor:
        """All codes, (V, M)."""
        return unpack(self.codes, self.bits, self.books).long()


def check_codes(codebooks: int, entries: int) -> None:
    """Refuse codes that cannot be packed, and more of them than can be solved for at once."""
    if not (isinstance(entries, int) and 2 <= entries <= 256 and entries & (entries - 1) == 0):
        raise UserError(f"A codebook of {entries} entries cannot be packed: use a power of two from 2 to 256.")
    if not isinstance(codebooks, int) or not 1 <= codebooks <= MOST_ENTRIES // entries:
        most = f"1 to {MOST_ENTRIES // entries} codebooks of {entries}"
        raise UserError(f"codebooks is {codebooks!r}, but must be a whole number: use {most}.")


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
    books = best_entries(rows, codes, books, mass)
    if progress:
        progress(rounds, rounds)
    return CodedRows.of(codes, books, coded.dtype)


def best_entries(points: Tensor, codes: Tensor, books: Tensor, mass: Tensor) -> Tensor:
    """The entries with the least error for given codes: a ridge regression of the rows on their codes, in float64.

    The ridge pulls towards the entries so far, so one that no row uses stays as it is.
    """
    count, entries, width = books.shape
    total = count * entries
    offsets = torch.arange(0, total, entries, device=codes.device)
    both = torch.zeros(total, total, dtype=torch.float64, device=points.device)
    towards = torch.zeros(total, width, dtype=torch.float64, device=points.device)
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
