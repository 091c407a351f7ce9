"""An encoder: every vector of a row in the context of all others.

With norms behind the sub-layers and learned positions it computes what BERT does; with norms before them, rotary
positions and gated feed-forward layers what ModernBERT does. The stock classes of transformers take such weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import MOST_DEEP, MOST_WIDE, Config, rate, setting
from torchdefine.context.residual import Stream, Update, add_and_norm, closing
from torchdefine.context.transformer import by_head, glorot
from torchdefine.errors import UserError
from torchdefine.modes import Prepared, untouched
from torchdefine.ops import autocast_dtype, exact_dtype

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class EncoderConfig(Config):
    """A Transformer encoder; its width is that of the embedding."""

    kind: Literal["encoder"] = "encoder"
    layers: int = setting(6, "Number of layers.", at_least=1, at_most=MOST_DEEP)
    heads: int = setting(8, "Number of attention heads.", at_least=1, at_most=MOST_DEEP)
    hidden_dim: int = setting(2048, "Width of the feed-forward layers.", at_least=1, at_most=MOST_WIDE)
    norm: Literal["pre", "post"] = setting("post", "Whether layer norms come before or after every sub-layer.")
    positions: Literal["learned", "rotary"] = setting(
        "learned", "Add a learned vector for each position to its input, or rotate queries and keys."
    )
    gated: bool = setting(False, "Feed-forward layers with a gate (GeGLU); they have half as many weights again.")
    most_places: int = setting(
        512, "Largest number of tokens in a row; learned positions have a vector for each.", at_least=1
    )
    dropout: float = rate("Dropout rate of inputs and after every sub-layer.", default=0.1)
    attention_dropout: float = rate("Dropout rate of the attention weights.")

    def build(self, width: int) -> Encoder:
        return Encoder(width, self)


class Encoder(Prepared):
    """(B, T, width) → the same, in context."""

    def __init__(self, width: int, config: EncoderConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or EncoderConfig()
        self.width = width
        if width % (2 * config.heads):
            problem = f"The encoder's width {width} cannot be split into {config.heads} heads of equal, even width"
            raise UserError(f"{problem}: try {max(width // (2 * config.heads), 1) * 2 * config.heads}.")
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.most_places, width)) if learned else None
        self.norm = nn.LayerNorm(width)
        self.layers: Any = nn.ModuleList(EncoderLayer(width, config, index == 0) for index in range(config.layers))
        self.last_norm = nn.LayerNorm(width) if config.norm == "pre" else None
        if self.positions is not None:
            nn.init.normal_(self.positions, std=0.02)

    def prepare(self, on: bool = True) -> None:
        self.fused = on and untouched(self, EncoderLayer, Attention, FeedForward, nn.Linear, nn.LayerNorm)
        for layer in self.layers:
            layer.fused = self.fused

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """``visible`` (B, T) is True where there is no padding."""
        if not torch.compiler.is_compiling() and x.shape[1] > self.config.most_places:
            problem = f"A row has {x.shape[1]} tokens, but the encoder has places for {self.config.most_places}"
            raise UserError(f"{problem}: cut the row, or train with a larger context.most_places.")
        if autocast_dtype(x) is not None:  # a unit gives half precision, too little for sums over all layers
            x = x.float()
        if self.positions is not None:
            x = x + F.embedding(torch.arange(x.shape[1], device=x.device), self.positions)
        x = F.dropout(self.norm(x), self.config.dropout, self.training)
        turns = None if self.positions is not None else rotations(x.shape[1], self.width // self.config.heads, x)
        mask = None if visible is None else visible[:, None, None]
        stream = Stream(x, x)  # both kinds of layers first read the norm of the embeddings itself
        for index, layer in enumerate(self.layers):
            last = index + 1 == len(self.layers)
            following = self.last_norm if last else self.layers[index + 1].attention_norm
            stream = layer(stream, turns, mask, following)
        return stream.read


class EncoderLayer(nn.Module):
    """Attention, then a feed-forward layer.

    With norms before sub-layers, ``attention_norm`` is computed at the end of the layer before. The first layer has
    none, since it reads the norm of the embeddings.
    """

    fused = False
    """Set by the encoder, for all of its layers together."""

    def __init__(self, width: int, config: EncoderConfig, first: bool) -> None:
        super().__init__()
        self.pre, self.dropout = config.norm == "pre", config.dropout
        self.attention, self.feed_forward = Attention(width, config), FeedForward(width, config)
        self.attention_norm = None if first and self.pre else nn.LayerNorm(width)
        self.feed_norm = nn.LayerNorm(width)

    def forward(
        self, x: Stream, turns: tuple[Tensor, Tensor] | None, mask: Tensor | None, following: nn.LayerNorm | None
    ) -> Stream:
        """``following`` is the norm that comes next if norms come first: the next layer's, or the encoder's last."""
        dropout = self.dropout if self.training else 0.0
        norms = (self.feed_norm, following) if self.pre else (self.attention_norm, self.feed_norm)
        attended = closing(self.attention(x.read, turns, mask), self.attention.out, self.fused)
        x = self._added(x, attended, norms[0], dropout)
        fed = closing(self.feed_forward(x.read), self.feed_forward.reduce, self.fused)
        return self._added(x, fed, norms[1], dropout)

    def _added(self, x: Stream, update: Update, norm: Any, dropout: float) -> Stream:
        return add_and_norm(x.past, update, norm, dropout, self.fused, self.pre)


class Attention(nn.Module):
    """Every place asks all places of its row; ``out`` is applied by the layer."""

    def __init__(self, width: int, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.query_key_value = glorot(nn.Linear(width, 3 * width), parts=3)
        self.out = glorot(nn.Linear(width, width))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        query, key, value = (by_head(part, self.heads) for part in self.query_key_value(x).chunk(3, dim=-1))
        if turns is not None:
            query, key = turned(query, turns), turned(key, turns)  # (B, h, T, d)
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, mask, dropout)  # (B, h, T, d)
        return found.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """A wide layer with GELU, with a gate or without; ``reduce`` is applied by the encoder's layer."""

    def __init__(self, width: int, config: EncoderConfig) -> None:
        super().__init__()
        self.gated = config.gated
        parts = 2 if config.gated else 1
        self.expand = glorot(nn.Linear(width, parts * config.hidden_dim), parts)
        self.reduce = glorot(nn.Linear(config.hidden_dim, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        if not self.gated:
            return F.gelu(hidden)
        through, gate = hidden.chunk(2, dim=-1)
        return F.gelu(through) * gate


def rotations(length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of rotary positions, (length, head_dim) each; both halves have the same."""
    exact = exact_dtype(like)
    positions = torch.arange(length, device=like.device, dtype=exact)
    rates = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=exact) / head_dim)
    angles = (positions[:, None] * rates).repeat(1, 2)  # (length, head_dim)
    return angles.cos(), angles.sin()


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Each pair of a vector's numbers, i and i + d / 2, rotated by its place's angle."""
    cosines, sines = turns
    first, second = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)
