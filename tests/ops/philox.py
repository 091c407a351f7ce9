"""The masks that kernels draw, worked out in torch from the published description of Philox4x32."""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int) -> tuple[Tensor, ...]:
    """Four words of 32 bits for every place, as int64."""
    a, b, c, d = counters
    low, high = seed & WORD, seed >> 32 & WORD
    for _ in range(rounds):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57  # what overflows an int64 still has the right bits
        a, b, c, d = right >> 32 & WORD ^ b ^ low, right & WORD, left >> 32 & WORD ^ d ^ high, left & WORD
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return a, b, c, d


def drawn_mask(seed: Tensor, rows: int, width: int, share: float) -> Tensor:
    """What kernels keep of (rows, width) features, on the seed's device."""
    row, column = torch.arange(rows)[:, None], torch.arange(width)[None, :]
    nothing = torch.zeros(rows, width, dtype=torch.int64)
    words = torch.stack(philox((nothing + column // 8, nothing + row, nothing, nothing), int(seed), rounds=7))
    word = words.gather(0, (nothing + column % 8 // 2)[None])[0]
    bits = torch.where(column % 2 == 0, word & 0xFFFF, word >> 16)
    return (bits >= round((1 - share) * 65536)).to(seed.device)
