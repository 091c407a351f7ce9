"""Trains the codebooks of trellis-coded rows on normal numbers, and measures what they lose: a few minutes on one core.

Lloyd's rounds: numbers are coded, then every value becomes the mean of the numbers that chose it, lately more than long
ago. ``python results/train_codebooks.py`` writes the file that torchdefine ships.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from torchdefine.sealed_tensors import write_safetensors
from torchdefine.tables import trellis
from torchdefine.tables.trellis import BITS, BOOKS, CODEBOOKS, MEMORIES, steps_of
from torchdefine.tables.trellis_search import Encoder

WIDTH = 192
ROUNDS = ((40, 320, 0.8), (12, 1280, 0.9))
"""So many rounds, each on so many rows or a few more, and what is left of earlier sums after a round."""
FORGET = 5
"""The first rounds, whose sums are not kept."""
OWN_MASS = 2.0
"""How many numbers an old value counts as."""
MEASURED_ON = 2560
"""Rows."""


def train(bits: float, memory: int, books: Tensor, generator: torch.Generator) -> float:
    """Replace the codebooks for some bits by good ones; returns what is left of a normal variable's variance."""
    step = steps_of([[bits, 2]])[0]
    own = books[step.book : step.book + step.columns]
    quantiles = torch.erfinv(2 * (torch.arange(2**memory) + 0.5) / 2**memory - 1) * 2**0.5
    spread = 1 + 0.73 * (bits / memory) ** 2  # single numbers are coded best by values that are denser far out
    choices, others = 2**step.own, 2 ** (memory - step.own)
    for book in own:  # the choices that own bits make are far apart
        rank = torch.rand(choices, others, generator=generator).argsort(0) * others
        book.copy_(spread * quantiles[(rank + torch.randperm(others, generator=generator)).flatten()])
    sums, masses, done = torch.zeros_like(own), torch.zeros(2**memory), 0
    for rounds, rows, left in ROUNDS:
        for _ in range(rounds):
            encoder = Encoder([[bits, WIDTH]], memory, books)
            kept = left if done >= FORGET else 0.0
            sums, masses, done = kept * sums, kept * masses, done + 1
            for _ in range(0, rows, encoder.count):
                x = torch.randn(WIDTH, encoder.count, generator=generator)
                windows = encoder.windows(x).flatten()
                masses.index_add_(0, windows, torch.ones(len(windows)))
                for column, total in enumerate(sums):
                    total.index_add_(0, windows, x[column :: step.columns].flatten())
            own.copy_((sums + OWN_MASS * own) / (masses + OWN_MASS))
    own.copy_(own.half())
    return measured(bits, memory, books, generator)


def measured(bits: float, memory: int, books: Tensor, generator: torch.Generator) -> float:
    """The loss of rows that the codebooks were not trained on, with the scale that loses least."""
    encoder = Encoder([[bits, WIDTH]], memory, books)
    xx = xv = vv = 0.0
    for _ in range(0, MEASURED_ON, encoder.count):
        x = torch.randn(WIDTH, encoder.count, generator=generator)
        v = encoder.values(encoder.windows(x))
        xx, xv, vv = xx + float(x.square().sum()), xv + float((x * v).sum()), vv + float(v.square().sum())
    return 1 - xv**2 / vv / xx


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    tensors = {}
    for memory in MEMORIES:
        books, lost = torch.zeros(BOOKS, 2**memory), []
        for bits in BITS:
            start = time.process_time()
            lost.append(train(bits, memory, books, torch.Generator().manual_seed(memory)))
            seconds = time.process_time() - start
            print(f"memory {memory}, {bits} bits: {lost[-1]:.3g} is left, {seconds:.0f} s", file=sys.stderr, flush=True)
        tensors[f"values {memory}"], tensors[f"losses {memory}"] = books.half(), torch.tensor(lost)
    write_safetensors(Path(trellis.__file__).with_name(CODEBOOKS), tensors)


if __name__ == "__main__":
    main()
