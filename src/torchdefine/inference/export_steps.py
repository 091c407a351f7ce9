"""Models as programs of plain torch operations: flat tensors in, flat tensors out, one step of a sequence at a time.

The arithmetic of the two context models is written out here once more, for evaluation only and without a fused kernel,
so that a program runs anywhere and for every batch and length. Its outputs are always compared with the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.context import LSTM, DecoderState, TransformerXL
from torchdefine.context.relative_attention import RelativeAttention, sinusoids
from torchdefine.context.transformer import by_head
from torchdefine.context.transformer_xl import TransformerXLLayer
from torchdefine.embedding import TokenEmbedding
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.translation.model import Translator


class EmbeddingProgram(nn.Module):
    """(B, T) ids → (B, T, m) vectors: by the unit, or from the finished table where the embedding looks them up."""

    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        return (self.embedding(ids),)


class LSTMStep(nn.Module):
    """(B,) ids and the state of every layer, hidden and cell (B, width) → (B, V) log-probabilities, state."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        context = self.model.context
        assert isinstance(context, LSTM)
        x = self.model.embedding(ids)  # (B, m)
        after: list[Tensor] = []
        for layer, (hidden, cell) in zip(context.layers, in_pairs(carried), strict=True):
            of_input: list[Any] = [layer.weight_ih_l0, layer.bias_ih_l0]
            of_state: list[Any] = [layer.weight_hh_l0, layer.bias_hh_l0]
            gates = F.linear(x, *of_input) + F.linear(hidden, *of_state)  # (B, 4 · width)
            enter, keep, new, leave = gates.chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
            x = leave.sigmoid() * cell.tanh()  # (B, width)
            after += [x, cell]
        return (self.model.output.log_prob(x), *after)


class _Places(NamedTuple):
    """How the T positions of a segment see K = M + T positions, the memory's first."""

    distance_vectors: Tensor
    """(K, d): column c is for the distance K - 1 - c."""
    columns: Tensor
    """(T, K): where a query finds the distance to a key; any column for a key that it must not see."""
    blocked: Tensor
    """(T, K): True for keys that lie ahead, out of reach, or in memory not yet written."""


class TransformerXLStep(nn.Module):
    """(B, T) ids, how much of the memory is filled, and the memory → (B, V) after the last id, and both updated."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        filled, *memories = carried
        length, memory_length = ids.shape[1], memories[0].shape[1]
        places = self._places(length, memory_length, filled)
        hidden = self.model.embedding(ids)  # (B, T, d)
        after = []
        for layer, memory in zip(self._context.layers, memories, strict=True):
            assert isinstance(layer, TransformerXLLayer)
            seen = torch.cat((memory, hidden), dim=1)  # (B, K, d)
            after.append(seen[:, length:])  # (B, M, d)
            hidden = self._through(layer, hidden, seen, places)  # (B, T, d)
        now_filled = (filled + length).clamp(max=memory_length)
        return (self.model.output.log_prob(hidden[:, -1]), now_filled, *after)

    @property
    def _context(self) -> TransformerXL:
        assert isinstance(self.model.context, TransformerXL)
        return self.model.context

    def _places(self, length: int, memory_length: int, filled: Tensor) -> _Places:
        reach, keys = self._context.evaluation, memory_length + length
        key = torch.arange(keys, device=filled.device)  # (K,)
        query = torch.arange(memory_length, keys, device=filled.device)[:, None]  # (T, 1)
        distances = query - key  # (T, K)
        blocked = (distances < 0) | (key < memory_length - filled)
        if reach.same_length:
            blocked = blocked | (distances >= memory_length)
        vectors = sinusoids(key.flip(0).clamp(0, reach.clamp), self._context.input_dim, torch.float32)
        return _Places(vectors, (keys - 1 - distances).clamp(max=keys - 1), blocked)

    def _through(self, layer: TransformerXLLayer, x: Tensor, seen: Tensor, places: _Places) -> Tensor:
        def feed_forward(x: Tensor) -> Tensor:
            return layer.reduce(F.relu(layer.expand(x)))

        if layer.pre_norm:
            x = x + self._attend(layer.attention, layer.attention_norm(seen), places)
            return x + feed_forward(layer.feed_forward_norm(x))
        x = layer.attention_norm(x + self._attend(layer.attention, seen, places))
        return layer.feed_forward_norm(x + feed_forward(x))

    def _attend(self, attention: RelativeAttention, seen: Tensor, places: _Places) -> Tensor:
        heads, length = attention.heads, places.columns.shape[0]
        to_queries, to_keys, to_values, to_distances = attention.inward.weight.chunk(4)
        own = seen[:, seen.shape[1] - length :]
        queries = by_head(F.linear(own, to_queries), heads)  # (B, H, T, D)
        keys = by_head(F.linear(seen, to_keys), heads)  # (B, H, K, D)
        values = by_head(F.linear(seen, to_values), heads)  # (B, H, K, D)
        distances = by_head(F.linear(places.distance_vectors, to_distances)[None], heads)  # (1, H, K, D)
        by_content = (queries + self._context.content_bias[:, None]) @ keys.transpose(2, 3)  # (B, H, T, K)
        by_distance = (queries + self._context.distance_bias[:, None]) @ distances.transpose(2, 3)
        scores = by_content + by_distance.gather(3, places.columns.expand_as(by_distance))  # (B, H, T, K)
        scores = (scores * attention.head_dim**-0.5).masked_fill(places.blocked, -torch.inf)
        mixed = scores.softmax(-1) @ values  # (B, H, T, D)
        return attention.outward(mixed.transpose(1, 2).flatten(2))  # (B, T, d)


class EncoderProgram(nn.Module):
    """(B, S) source ids → (B, S, m) vectors, (B, S) True where there is no padding, keys and values for the decoder."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        encoded, visible = self.model.encode(ids)
        return (encoded, visible, *flat(self.model.transformer.start(encoded, visible).memory))


class DecoderStep(nn.Module):
    """Last target ids (B,), the source's mask, keys and values, the target's keys and values → (B, V), the last two."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        visible, *keys_and_values = carried
        log_probs, after = self.model.step(ids, decoder_state(visible, keys_and_values))
        return (log_probs, *flat(after.own))


def decoder_state(visible: Tensor, keys_and_values: Sequence[Tensor]) -> DecoderState:
    """A decoder's state from flat keys and values, the source's in all layers before the target's."""
    pairs = in_pairs(keys_and_values)
    source, own = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    return DecoderState(own, source, visible[:, None, None, :], own[0][0].shape[2])


def in_pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def flat(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]
