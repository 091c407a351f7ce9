"""An encoder–decoder Transformer: vectors of a source and of a target → vectors in context; fused attention, cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import MOST_DEEP, MOST_WIDE, Config, rate, setting
from torchdefine.context.residual import Stream, Update, add_and_norm, closing, feed_forward
from torchdefine.context.sru import SRULayer
from torchdefine.errors import UserError
from torchdefine.modes import Prepared, untouched
from torchdefine.ops import autocast_dtype, exact_dtype, locked_dropout


@dataclass(frozen=True)
class TransformerConfig(Config):
    """Both stacks of an encoder–decoder Transformer; the defaults are those of the base model."""

    kind: Literal["transformer"] = "transformer"
    encoder_layers: int = setting(6, "Number of encoder layers.", at_least=1, at_most=MOST_DEEP)
    decoder_layers: int = setting(6, "Number of decoder layers.", at_least=1, at_most=MOST_DEEP)
    heads: int = setting(
        8, "Number of attention heads; together they are as wide as the embedding.", at_least=1, at_most=MOST_DEEP
    )
    hidden_dim: int = setting(2048, "Width of the feed-forward layers.", at_least=1, at_most=MOST_WIDE)
    norm: Literal["pre", "post"] = setting("pre", "Whether layer norms come before or after every sub-layer.")
    dropout: float = rate("Dropout rate of inputs, after every sub-layer and in feed-forward layers.", default=0.1)
    attention_dropout: float = rate("Dropout rate of the attention weights.")
    feed_forward: Literal["relu", "sru"] = setting(
        "relu", "First part of a feed-forward layer: a linear layer with ReLU, or an SRU."
    )
    sru_dropout: float = rate("Dropout rate of the outputs of SRUs, with one mask for all positions of a sequence.")

    def build(self, width: int) -> Transformer:
        return Transformer(width, self)


KeysAndValues = tuple[Tensor, Tensor]
Past = tuple[Tensor, ...]
"""Of a layer, after some places of a target: keys, values and, with an SRU, its cell, (N, hidden_dim)."""


class DecoderState(NamedTuple):
    """What decoding step by step remembers: N = B · K rows, K hypotheses for each of B sources."""

    own: Sequence[Past]  # of the target so far in every layer; keys and values are (N, h, t, d)
    memory: list[KeysAndValues]  # of the source in every layer, each (B, h, S, d): once for all hypotheses
    visible: Tensor  # (B, 1, 1, S): which places of the source are not padding

    def select(self, rows: Tensor, sources: Tensor | None = None) -> DecoderState:
        """The rows (N',) of the target side, in that order, and if given only some of the sources (B',)."""
        own = [tuple(part.index_select(0, rows) for part in past) for past in self.own]
        if sources is None:
            return self._replace(own=own)
        memory = [(k.index_select(0, sources), v.index_select(0, sources)) for k, v in self.memory]
        return DecoderState(own, memory, self.visible.index_select(0, sources))


class Transformer(Prepared):
    """``encode`` the source once, then ``decode`` a whole target, or ``start`` and ``step`` through it with a cache."""

    def __init__(self, width: int, config: TransformerConfig | None = None) -> None:
        super().__init__()
        self.width, self.config = width, config or TransformerConfig()
        heads = self.config.heads
        if width % (2 * heads):
            problem = f"The Transformer's width {width} cannot be split into {heads} heads of equal, even width"
            raise UserError(f"{problem}: try {max(width // (2 * heads), 1) * 2 * heads}.")
        self.encoder: Any = nn.ModuleList(EncoderLayer(width, self.config) for _ in range(self.config.encoder_layers))
        self.decoder: Any = nn.ModuleList(DecoderLayer(width, self.config) for _ in range(self.config.decoder_layers))
        pre = self.config.norm == "pre"
        self.encoder_norm = nn.LayerNorm(width) if pre else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if pre else nn.Identity()

    def prepare(self, on: bool = True) -> None:
        layers = (EncoderLayer, DecoderLayer, Residual, SelfAttention, CrossAttention, FeedForward)
        recurrent = (SRUFeedForward, SRULayer)
        self.fused = on and untouched(self, *layers, *recurrent, nn.Linear, nn.LayerNorm, nn.Identity)
        for part in self.modules():
            if isinstance(part, _Part):
                part.fused = self.fused

    def encode(self, x: Tensor, visible: Tensor) -> Tensor:
        """(B, S, width) vectors and (B, S) True where there is no padding → the memory, (B, S, width)."""
        stream = self.encoder[0].attend.enter(self._placed(x))
        for layer, following in zip(self.encoder, norms_after(self.encoder, self.encoder_norm), strict=True):
            stream = layer(stream, visible[:, None, None], following)
        return cast(Stream, stream).read

    def decode(self, y: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """(B, T, width) vectors, each of which sees those before it and the memory → (B, T, width)."""
        return self._decoded(y, self._remembered(memory), visible[:, None, None])[0]

    def start(self, memory: Tensor, visible: Tensor, hypotheses: int = 1) -> DecoderState:
        """The state before the first of ``hypotheses`` targets for each source of ``memory``."""
        heads, width = self.config.heads, self.width // self.config.heads
        nothing = memory.new_zeros(memory.shape[0] * hypotheses, heads, 0, width)
        cells = self.decoder[0].feed_forward.first_cells(nothing)
        own = [(nothing, nothing, *cells)] * len(self.decoder)
        return DecoderState(own, self._remembered(memory), visible[:, None, None])

    def step(self, y: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """One more vector of every target, (N, width) → (N, width), and the state that includes it."""
        vectors, own = self._decoded(y.unsqueeze(1), state.memory, state.visible, state.own)  # (N, 1, width)
        return vectors.squeeze(1), state._replace(own=own)

    def _remembered(self, memory: Tensor) -> list[KeysAndValues]:
        return [layer.across.remember(memory) for layer in self.decoder]

    def _decoded(
        self, y: Tensor, memory: list[KeysAndValues], mask: Tensor, past: Sequence[Past] | None = None
    ) -> tuple[Tensor, list[Past]]:
        """(N, T, width) → the same, and every layer's past so far; with ``past``, y is the place after."""
        stream, present = self.decoder[0].attend.enter(self._placed(y, past[0][0].shape[2] if past else 0)), []
        followings = norms_after(self.decoder, self.decoder_norm)
        for index, (layer, following) in enumerate(zip(self.decoder, followings, strict=True)):
            stream, own = layer(stream, memory[index], mask, following, past[index] if past else None)
            present.append(own)
        return stream.read, present

    def _placed(self, x: Tensor, start: int = 0) -> Tensor:
        """Vectors with their positions added, whose root mean square is 0.7: give vectors of about that size."""
        if autocast_dtype(x) is not None:  # a unit gives half precision, too little for sums over all layers
            x = x.float()
        placed = x + sinusoids(start, x.shape[1], self.width, x)
        return F.dropout(placed, self.config.dropout, self.training)


def sinusoids(start: int, length: int, width: int, like: Tensor) -> Tensor:
    """Sines and cosines of the positions from ``start`` on, (length, width), with device and dtype of ``like``."""
    exact = exact_dtype(like)
    positions = torch.arange(start, start + length, device=like.device, dtype=exact)
    rates = torch.exp(torch.arange(0, width, 2, device=like.device, dtype=exact) * (-math.log(10_000.0) / width))
    angles = positions[:, None] * rates  # (length, width / 2)
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)


class EncoderLayer(nn.Module):
    """Attention to all places of the source, then a feed-forward layer."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.within = SelfAttention(width, config)
        self.feed_forward = FEED_FORWARD[config.feed_forward](width, config)
        self.attend, self.feed = Residual(width, config), Residual(width, config)

    def forward(self, x: Stream, mask: Tensor, following: nn.Module) -> Stream:
        """``following`` is the next layer's first norm, or the stack's last one; used if norms come first."""
        x = self.attend.after(x, self.within(x.read, mask=mask)[0], self.feed.norm)
        return self.feed.after(x, self.feed_forward(x.read)[0], following)


class DecoderLayer(nn.Module):
    """Attention to the target so far, attention to the source, then a feed-forward layer."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.within = SelfAttention(width, config)
        self.across = CrossAttention(width, config)
        self.feed_forward = FEED_FORWARD[config.feed_forward](width, config)
        self.attend, self.look, self.feed = Residual(width, config), Residual(width, config), Residual(width, config)

    def forward(
        self, y: Stream, memory: KeysAndValues, mask: Tensor, following: nn.Module, past: Past | None = None
    ) -> tuple[Stream, Past]:
        """A whole target without ``past``, or one place after it; also returns the past so far.

        ``following`` is the next layer's first norm, or the stack's last one; used if norms come first.
        """
        attended, present = self.within(y.read, causal=past is None, past=past)
        y = self.attend.after(y, attended, self.look.norm)
        y = self.look.after(y, self.across(y.read, memory, mask), self.feed.norm)
        fed, cells = self.feed_forward(y.read, past[2:] if past else ())
        return self.feed.after(y, fed, following), (*present, *cells)


class _Part(nn.Module):
    fused = False
    """Set by the model, for all of its parts together."""


class Residual(_Part):
    """What surrounds a sub-layer: its norm, before or after, dropout, and the residual connection."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pre, self.dropout = config.norm == "pre", config.dropout

    def enter(self, x: Tensor) -> Stream:
        """The stream before this sub-layer, if it is the first one."""
        return Stream(x, self.norm(x) if self.pre else x)

    def after(self, x: Stream, update: Update, following: nn.Module) -> Stream:
        """The stream behind this sub-layer and before the next, whose norm is ``following``."""
        dropout = self.dropout if self.training else 0.0
        norm: Any = following if self.pre else self.norm
        return add_and_norm(x.past, update, norm, dropout, self.fused, self.pre)


def norms_after(layers: Any, last: nn.Module) -> list[nn.Module]:
    """For every layer of a stack the norm that its successor begins with; the stack's own for the last."""
    return [*(layer.attend.norm for layer in layers[1:]), last]


class SelfAttention(_Part):
    """Every place asks the places of the same sequence."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.query_key_value = glorot(nn.Linear(width, 3 * width), parts=3)
        self.out = glorot(nn.Linear(width, width))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, causal: bool = False, past: Past | None = None
    ) -> tuple[Update, KeysAndValues]:
        """(B, T, width) → the same, and the keys and values; with ``past``, x is the one place after it."""
        query, key, value = (by_head(part, self.heads) for part in self.query_key_value(x).chunk(3, dim=-1))
        if past is not None:
            key, value = torch.cat((past[0].to(key.dtype), key), 2), torch.cat((past[1].to(value.dtype), value), 2)
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal)  # (B, h, T, d)
        return closing(found.transpose(1, 2).flatten(2), self.out, self.fused), (key, value)


class CrossAttention(_Part):
    """Every place of the target asks the places of its source."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.query = glorot(nn.Linear(width, width))
        self.key_value = glorot(nn.Linear(width, 2 * width), parts=2)
        self.out = glorot(nn.Linear(width, width))

    def remember(self, memory: Tensor) -> KeysAndValues:
        """The source's keys and values, each (B, h, S, d)."""
        key, value = (by_head(part, self.heads) for part in self.key_value(memory).chunk(2, dim=-1))
        return key, value

    def forward(self, y: Tensor, memory: KeysAndValues, mask: Tensor) -> Update:
        """(N, T, width) → the same; the N = B · K targets of B sources ask together, so no source is copied."""
        key, value = memory
        asked = self.query(y).reshape(key.shape[0], -1, y.shape[-1])  # (B, K · T, width)
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(by_head(asked, self.heads), key, value, mask, dropout)
        return closing(found.transpose(1, 2).reshape(y.shape), self.out, self.fused)


class FeedForward(_Part):
    """Two linear layers with ReLU between them, place by place."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.expand = glorot(nn.Linear(width, config.hidden_dim))
        self.reduce = glorot(nn.Linear(config.hidden_dim, width))
        self.dropout = config.dropout

    def forward(self, x: Tensor, past: Past = ()) -> tuple[Update, Past]:
        dropout = self.dropout if self.training else 0.0
        return feed_forward(x, self.expand, self.reduce, dropout, self.fused), ()

    def first_cells(self, like: Tensor) -> Past:
        return ()


class SRUFeedForward(_Part):
    """An SRU without highway, which reads a sequence from its first place on, and a linear layer (Lei et al., 2018).

    Padding stands at the end of a sequence, where no place behind it is read.
    """

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.recurrent = SRULayer(width, config.hidden_dim, highway=False)
        self.reduce = glorot(nn.Linear(config.hidden_dim, width))
        self.dropout = config.sru_dropout

    def forward(self, x: Tensor, past: Past = ()) -> tuple[Update, Past]:
        """Whole sequences (N, T, width), or one place after the cell in ``past``; also returns the last cell."""
        if past:
            hidden, (after,) = self.recurrent.step(x[:, 0], (past[0][None],))  # (N, hidden_dim)
            return closing(hidden[:, None], self.reduce, self.fused), (after[0],)
        hidden, (after,) = self.recurrent(x.transpose(0, 1), (self.first_cells(x)[0][None],))  # (T, N, hidden_dim)
        dropped = locked_dropout(hidden, self.dropout if self.training else 0.0, time_dim=0)
        return closing(dropped.transpose(0, 1), self.reduce, self.fused), (after[0],)

    def first_cells(self, like: Tensor) -> Past:
        return (like.new_zeros(like.shape[0], self.recurrent.output_dim),)


FEED_FORWARD: dict[str, type[FeedForward | SRUFeedForward]] = {"relu": FeedForward, "sru": SRUFeedForward}


def by_head(x: Tensor, heads: int) -> Tensor:
    """(B, T, h · d) → (B, h, T, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def glorot(linear: nn.Linear, parts: int = 1) -> nn.Linear:
    """Fresh weights by Glorot's rule, for each of the matrices that the layer holds one above the other; no bias."""
    for matrix in linear.weight.chunk(parts):
        nn.init.xavier_uniform_(matrix)
    nn.init.zeros_(linear.bias)
    return linear
