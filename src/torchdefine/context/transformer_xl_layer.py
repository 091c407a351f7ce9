"""One layer of a Transformer-XL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.context.relative_attention import (
    KernelSurroundings,
    PlainSurroundings,
    RelativeAttention,
    Surroundings,
)
from torchdefine.context.residual import DenseWeights, Stream, Update, add_and_norm, feed_forward

if TYPE_CHECKING:
    from torchdefine.context.transformer_xl import TransformerXLConfig

AnySurroundings = Surroundings | KernelSurroundings | PlainSurroundings


class TransformerXLLayer(nn.Module):
    """Relative attention over memory and segment, then two dense layers at every position."""

    fused = False
    """Set by the model."""

    def __init__(self, dim: int, config: TransformerXLConfig) -> None:
        super().__init__()
        head_dim, inner_dim = config.head_dim or dim // config.heads, config.inner_dim or 4 * dim
        self.attention = RelativeAttention(dim, config.heads, head_dim, config.attention_dropout)
        self.attention_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, inner_dim)
        self.reduce = nn.Linear(inner_dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.hidden_dropout, self.pre_norm = config.hidden_dropout, config.pre_norm
        if config.layer_rank is not None:
            self.gate = nn.Linear(dim, config.layer_rank)
            self.widen = nn.Linear(config.layer_rank, dim, bias=False)

    def forward(
        self,
        x: Stream,
        memory: Tensor,
        around: AnySurroundings,
        weights: DenseWeights | None = None,
        vectors: Tensor | None = None,
    ) -> Stream:
        """``weights`` are those of the dense layers, if they were converted for all layers at once.

        ``vectors`` are the tokens' own for this layer, (B, T, layer_rank), where it has some.
        """
        dropout, own = self.hidden_dropout if self.training else 0.0, x.read
        if self.pre_norm:
            own, memory = self.attention_norm(own), self.attention_norm(memory.to(own.dtype))
        update = Update(self.attention(own, memory, around))
        norm_between = self.feed_forward_norm if self.pre_norm else self.attention_norm
        x = add_and_norm(x.past, update, norm_between, dropout, self.fused, self.pre_norm)
        update = feed_forward(x.read, self.expand, self.reduce, dropout, self.fused, weights)
        if vectors is not None:
            update = update._replace(values=update.values + self.widen(self.gate(x.read).sigmoid() * vectors))
        if self.pre_norm:  # the next layer begins with a norm
            total = x.past + F.dropout(update.whole(), dropout)
            return Stream(total, total)
        return add_and_norm(x.past, update, self.feed_forward_norm, dropout, self.fused, pre=False)
