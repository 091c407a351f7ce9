"""Transformer-XL as its textbook has it: scores in full, shifted by a copy, masked by another, one layer like the next.

Letters: B streams, T queries, M remembered positions, K = M + T keys, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.context import TransformerXL
from torchdefine.context.relative_attention import RelativeAttention, sinusoids
from torchdefine.context.transformer_xl_layer import TransformerXLLayer


class TextbookAttention(nn.Module):
    """The same mathematics as ours, with its weights."""

    def __init__(self, ours: RelativeAttention) -> None:
        super().__init__()
        self.heads, self.head_dim = ours.heads, ours.head_dim
        inner, width = ours.heads * ours.head_dim, ours.inward.in_features
        self.query_key_value = nn.Linear(width, 3 * inner, bias=False)
        self.distance = nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        with torch.no_grad():
            self.query_key_value.weight.copy_(ours.inward.weight[: 3 * inner])
            self.distance.weight.copy_(ours.inward.weight[3 * inner :])
            self.out.weight.copy_(ours.outward.weight)

    def forward(self, seen: Tensor, queries: int, vectors: Tensor, *biases: Tensor) -> Tensor:
        """(B, K, d) positions, the last of which ask, and (K, d) vectors of the distances K - 1 … 0 → (B, T, d)."""
        q, k, v = (self._heads(part) for part in self.query_key_value(seen).chunk(3, dim=-1))  # (B, K, H, …)
        q, (content_bias, distance_bias) = q[:, -queries:], biases  # (H, …) each
        r = self._heads(self.distance(vectors))  # (K, H, …)
        content = torch.einsum("bihd,bjhd->bhij", q + content_bias, k)
        place = shifted(torch.einsum("bihd,jhd->bhij", q + distance_bias, r))  # (B, H, T, K)
        keys = seen.shape[1]
        ahead = torch.ones(queries, keys, dtype=torch.bool, device=seen.device).triu(1 + keys - queries)
        scores = (content + place) / math.sqrt(self.head_dim)
        weights = scores.masked_fill(ahead, -math.inf).softmax(-1)  # (B, H, T, K)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))


def shifted(place: Tensor) -> Tensor:
    """Scores with a column for each distance → with a column for each key, through a copy one column wider."""
    batch, heads, queries, keys = place.shape
    padded = torch.cat((place.new_zeros(batch, heads, queries, 1), place), -1)  # (B, H, T, K + 1)
    return padded.view(batch, heads, keys + 1, queries)[:, :, 1:].reshape(place.shape)


class PlainTransformerXLLayer(nn.Module):
    def __init__(self, ours: TransformerXLLayer) -> None:
        super().__init__()
        self.attention = TextbookAttention(ours.attention)
        self.attention_norm, self.feed_forward_norm = ours.attention_norm, ours.feed_forward_norm
        self.expand, self.reduce, self.dropout = ours.expand, ours.reduce, ours.hidden_dropout

    def forward(self, x: Tensor, memory: Tensor, *around: Tensor) -> Tensor:
        seen = torch.cat((memory, x), dim=1)  # (B, K, d)
        x = self.attention_norm(x + self._drop(self.attention(seen, x.shape[1], *around)))
        inner = self._drop(F.relu(self.expand(x)))
        return self.feed_forward_norm(x + self._drop(self.reduce(inner)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class PlainTransformerXL(nn.Module):
    """(B, T, d) → (B, T, d) with the weights of one of ours, whose norms come after its parts."""

    def __init__(self, ours: TransformerXL) -> None:
        super().__init__()
        self.memory, self.config = ours.reach.memory, ours.config
        self.content_bias, self.distance_bias = ours.content_bias, ours.distance_bias
        layers = [layer for layer in ours.layers if isinstance(layer, TransformerXLLayer)]
        self.layers = nn.ModuleList(PlainTransformerXLLayer(layer) for layer in layers)

    def forward(self, x: Tensor, state: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """The outputs, and what entered each layer at the last M positions; the memory begins without any."""
        memories = state or [x[:, :0].detach() for _ in self.layers]
        keys = memories[0].shape[1] + x.shape[1]
        distances = torch.arange(keys - 1, -1, -1, device=x.device)
        vectors = F.dropout(sinusoids(distances, x.shape[-1], torch.float32), self.config.input_dropout, self.training)
        hidden = F.dropout(x, self.config.input_dropout, self.training)
        after = []
        for layer, memory in zip(self.layers, memories, strict=True):
            after.append(torch.cat((memory, hidden.detach().to(memory.dtype)), dim=1)[:, -self.memory :])
            hidden = layer(hidden, memory.to(hidden.dtype), vectors.to(x.dtype), self.content_bias, self.distance_bias)
        return F.dropout(hidden, self.config.output_dropout, self.training), after
