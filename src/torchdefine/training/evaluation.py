"""The measure of a model on a text, and the protocol that it was measured by."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torchdefine.data.token_file import TokenHeader


@dataclass(frozen=True)
class Evaluation:
    """The result of predicting a text."""

    tokens: int
    loss: float
    """Nats a token."""
    perplexity: float
    bits_per_byte: float | None
    unknown_share: float
    """Tokens of the text that are outside the vocabulary."""
    protocol: str

    @classmethod
    def of(cls, nats: float, text: TokenHeader, protocol: str) -> Evaluation:
        """From the nats of all tokens of a text together."""
        loss = nats / text.tokens
        bits_per_byte = nats / math.log(2) / text.bytes if text.bytes else None
        return cls(text.tokens, loss, perplexity(loss), bits_per_byte, text.unknown / text.tokens, protocol)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def arithmetic(model: nn.Module) -> str:
    """The arithmetic of products; a validation uses what the training allows."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return "float32, products in TF32" if on_gpu and torch.backends.cuda.matmul.allow_tf32 else "float32"


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
