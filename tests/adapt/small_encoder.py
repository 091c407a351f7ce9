"""A sentence encoder of the tests' own: small, with something in it that feels some directions more than others."""

import torch
from torch import Tensor, nn

from torchdefine.adapt import Behaviour

V, M = 400, 32


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.tokens = nn.Embedding(V, M)
        self.norm = nn.LayerNorm(M)
        self.mix = nn.Linear(M, 48)
        self.head = nn.Linear(48, 24)
        with torch.no_grad():
            self.tokens.weight.copy_(torch.randn(V, M) @ (torch.randn(M, M) * torch.logspace(0, -1, M)[:, None]))
            self.mix.weight[:, 8:] *= 0.05
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.norm(self.tokens(ids))))  # (B, T, 48)
        return self.head(self.drop(hidden).mean(1))


def zipf_batches(count: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    chances = 1 / (1 + torch.arange(V)).float()
    return [torch.multinomial(chances, 16 * 12, True, generator=random).reshape(16, 12) for _ in range(count)]


def counts() -> Tensor:
    ids = torch.cat([batch.flatten() for batch in zipf_batches(200, 99)])
    return torch.bincount(ids, minlength=V)


def behaviour(model: Encoder | None = None, batches: int = 8, seed: int = 0) -> Behaviour:
    return Behaviour(model or Encoder(), "tokens", lambda m, batch: m(batch), zipf_batches(batches, seed))
