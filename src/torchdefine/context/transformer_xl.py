"""Transformer-XL (Dai et al., 2019): attention that reaches back into a memory of earlier segments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.context.relative_attention import (
    KernelSurroundings,
    PlainSurroundings,
    RelativeAttention,
    ScoreLayout,
    Surroundings,
    blocking,
    distances_behind,
    sinusoids,
    spare_features,
    with_one,
)
from torchdefine.context.residual import Stream, Update, add_and_norm, add_then_norm, closing, expanded
from torchdefine.errors import UserError
from torchdefine.ops import (
    Scoring,
    converted,
    exact_dtype,
    has_attention_kernel,
    has_fused_kernels,
    is_plain,
    product_dtype,
)

INIT_STD = 0.02

TransformerXLState = tuple[list[Tensor], Tensor]
"""The inputs of each layer at the last M positions, (B, M, d) each, and how many of them were written, (1,)."""


@dataclass(frozen=True)
class Reach:
    """How far back a position looks."""

    memory: int
    """Positions of earlier segments that are remembered, M."""
    same_length: bool = False
    """Let every position see exactly M positions, itself among them; else the later ones of a segment see more."""
    clamp: int | None = None
    """Treat larger distances as this one."""

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise UserError(f"The memory is {self.memory} positions, but must be at least 1: use 150, say.")
        if self.clamp is not None and self.clamp < 1:
            raise UserError(f"Distances are clamped at {self.clamp}, but that must be at least 1, or none.")


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a layer except the width of the vectors that pass through it."""

    heads: int
    head_dim: int
    inner_dim: int
    """Width between the two halves of the feed-forward part."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if getattr(self, f.name) < 1:
                raise UserError(f"{f.name} is {getattr(self, f.name)}, but must be at least 1.")


@dataclass(frozen=True)
class TransformerDropout:
    """Fractions of features zeroed in training."""

    input: float = 0.0
    """Of the input vectors, and of the distances' vectors."""
    hidden: float = 0.0
    """Of attention's output, inside the feed-forward part, and of that part's output."""
    output: float = 0.0
    attention: float = 0.0
    """Of the attention weights themselves."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0 <= getattr(self, f.name) < 1:
                raise UserError(f"The {f.name} dropout is {getattr(self, f.name)}, but must be at least 0 and below 1.")


class TransformerXL(nn.Module):
    """(B, T, input_dim) → (B, T, input_dim), with a memory of fixed length that starts empty.

    ``evaluation`` is how far back positions look in evaluation mode, ``reach`` if it is None; states are made for
    the mode that the module is in. Norms come after each part and its residual, or with ``pre_norm`` before the part.
    Shapes never depend on values, so that a step can be compiled or captured as a graph.
    """

    step_length = None

    def __init__(
        self,
        input_dim: int,
        layers: int,
        sizes: LayerSizes,
        reach: Reach,
        evaluation: Reach | None = None,
        dropout: TransformerDropout | None = None,
        pre_norm: bool = False,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise UserError(f"layers is {layers}, but must be at least 1.")
        if input_dim < 2 or input_dim % 2:
            raise UserError(
                f"The vectors are {input_dim} wide, but half of a distance's features are sines and half cosines: "
                f"use an even width, such as {max(input_dim + input_dim % 2, 2)}."
            )
        self.input_dim = self.output_dim = input_dim
        self.reach, self.evaluation = reach, evaluation or reach
        self.dropout, self.pre_norm = dropout or TransformerDropout(), pre_norm
        self.content_bias = nn.Parameter(torch.empty(sizes.heads, sizes.head_dim))
        self.distance_bias = nn.Parameter(torch.empty(sizes.heads, sizes.head_dim))
        self.layers_are_compiled = False
        self.layers = nn.ModuleList(TransformerXLLayer(input_dim, sizes, self.dropout, pre_norm) for _ in range(layers))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in the public Transformer-XL code: everything normal and small, norms around 1."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias") and parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(1.0 if "norm" in name else 0.0, INIT_STD)

    @property
    def current_reach(self) -> Reach:
        return self.reach if self.training else self.evaluation

    @property
    def carried(self) -> str:
        """What evaluation carries from one segment to the next, as stated in its protocol."""
        reach = self.evaluation
        notes = ["same length"] if reach.same_length else []
        notes += [f"distances clamped at {reach.clamp}"] if reach.clamp is not None else []
        return f"a memory of {reach.memory} positions" + (f" ({', '.join(notes)})" if notes else "")

    @contextmanager
    def remembering(self, memory: int | None = None, clamp: int | None = None) -> Iterator[None]:
        """Change for a while how far evaluation looks back; None leaves a setting as it is."""
        before = self.evaluation
        self.evaluation = Reach(
            before.memory if memory is None else memory, before.same_length, before.clamp if clamp is None else clamp
        )
        try:
            yield
        finally:
            self.evaluation = before

    def initial_state(self, batch_size: int) -> TransformerXLState:
        """Empty memories; under autocast in its dtype, since only products read them and would round them anyway."""
        shape = (batch_size, self.current_reach.memory, self.input_dim)
        dtype = self.content_bias.dtype if self.pre_norm else product_dtype(self.content_bias)
        memories = [self.content_bias.new_zeros(shape, dtype=dtype) for _ in self.layers]
        return memories, torch.zeros(1, dtype=torch.long, device=self.content_bias.device)

    def forward(self, x: Tensor, state: TransformerXLState) -> tuple[Tensor, TransformerXLState]:
        """The outputs, and the memory after the last position, cut off from the graph."""
        memories, filled = state
        around = self.surroundings(x, memories[0].shape[1], filled)
        hidden = F.dropout(x, self.dropout.input, self.training)  # (B, T, d)
        stream, after = Stream(hidden, hidden), []
        dense = self._dense_weights(x)
        for layer, memory, weights in zip(self.layers, memories, dense, strict=True):
            after.append(_remember(memory, stream.past if self.pre_norm else stream.read))
            stream = layer(stream, memory, around, weights)  # (B, T, d)
        now_filled = (filled + x.shape[1]).clamp(max=memories[0].shape[1])
        return F.dropout(stream.past, self.dropout.output, self.training), (after, now_filled)

    def step(self, x: Tensor, state: TransformerXLState) -> tuple[Tensor, TransformerXLState]:
        """A few positions, (B, T, input_dim), as ``forward`` in evaluation; see ``ContextModel``."""
        if not self._attention_is_plain:
            return self.forward(x, state)
        memories, filled = state
        length, memory_length = x.shape[1], memories[0].shape[1]
        around = self._for_a_step(x, memory_length, filled)
        stream, after = Stream(x, x), []
        for layer, memory in zip(self.layers, memories, strict=True):
            new = stream.past if self.pre_norm else stream.read
            after.append(torch.cat((memory, new.to(memory.dtype)), dim=1)[:, length:])  # (B, M, d) for every length
            stream = layer(stream, memory, around)  # (B, T, d)
        return stream.past, (after, (filled + length).clamp(max=memory_length))

    @property
    def step_notes(self) -> list[str]:
        notes = [f"`filled` says how many of the {self.evaluation.memory} positions of the memory were written."]
        if not self.evaluation.same_length:
            notes.append(
                "Once the memory is full, the later tokens of a long `ids` see more of the past than they would in "
                "steps of one: lengths matter, as they do in the model."
            )
        return notes

    def state_tensors(self) -> dict[str, int]:
        return {**{f"memory_{layer}": 1 for layer in range(len(self.layers))}, "filled": self.evaluation.memory + 1}

    def describe(self) -> str:
        return f"a Transformer-XL of {len(self.layers)} layers with {self.carried}"

    def _dense_weights(self, x: Tensor) -> list[DenseWeights | None]:
        """Every layer's weights in the dtype of the products; autocast would convert them one by one."""
        linears: list[Any] = [linear for layer in self.layers for linear in (layer.expand, layer.reduce)]
        plain = all(is_plain(linear, nn.Linear) for linear in linears)
        if not has_fused_kernels(x) or self.layers_are_compiled or not plain:
            return [None] * len(self.layers)
        halves = converted([linear.weight for linear in linears], product_dtype(x))
        return [DenseWeights(*pair) for pair in zip(halves[::2], halves[1::2], strict=True)]

    def compile_layers(self) -> None:
        """Compile the layers one at a time, so that all of them share what is compiled once."""
        self.layers_are_compiled = True
        for layer in self.layers:
            layer.compile()

    @property
    def _attention_is_plain(self) -> bool:
        return all(getattr(layer.attention, "is_plain", False) for layer in self.layers)

    def surroundings(self, x: Tensor, memory: int, filled: Tensor) -> Surroundings | KernelSurroundings:
        """What every layer must know of a segment (B, T, d) after a memory with ``filled`` positions written."""
        head_dim, dtype = self.content_bias.shape[1], product_dtype(x)
        drops = self.training and self.dropout.attention > 0
        takes_kernels = self._attention_is_plain and not (drops or self.layers_are_compiled)
        if takes_kernels and has_attention_kernel(x.device, dtype, head_dim + spare_features(head_dim)):
            return self._for_our_kernels(x, memory, filled)
        return self._for_fused_attention(x, memory, filled)

    def _for_our_kernels(self, x: Tensor, memory: int, filled: Tensor) -> KernelSurroundings:
        dtype, same_length = product_dtype(x), self.current_reach.same_length
        bias = with_one(self.content_bias).flatten()
        return KernelSurroundings(
            self._distance_vectors(x, distances_behind(memory + x.shape[1], x.device)),
            F.pad(bias, (0, 2 * len(bias))).to(dtype),
            self.distance_bias - self.content_bias,
            Scoring(filled, same_length, self.content_bias.shape[1] ** -0.5),
        )

    def _for_fused_attention(self, x: Tensor, memory: int, filled: Tensor) -> Surroundings:
        head_dim, dtype = self.content_bias.shape[1], product_dtype(x)
        layout = ScoreLayout.of(x.shape[1], memory + x.shape[1])
        distances = layout.distances(x.device)  # (W,)
        out_of_bounds = distances < 0
        if self.current_reach.same_length:
            out_of_bounds = out_of_bounds | (distances >= memory)
        empty = torch.arange(layout.keys, device=x.device) < memory - filled  # (K,)
        return Surroundings(
            layout,
            self._distance_vectors(x, distances),
            blocking(out_of_bounds, head_dim, dtype),
            blocking(empty, head_dim, dtype),
            with_one(self.content_bias).to(dtype),
            with_one(self.distance_bias * head_dim**-0.5).to(dtype),
        )

    def _for_a_step(self, x: Tensor, memory: int, filled: Tensor) -> PlainSurroundings:
        keys = memory + x.shape[1]
        key = torch.arange(keys, device=x.device)  # (K,)
        distances = torch.arange(memory, keys, device=x.device)[:, None] - key  # (T, K)
        blocked = (distances < 0) | (key < memory - filled)
        if self.current_reach.same_length:
            blocked = blocked | (distances >= memory)
        return PlainSurroundings(
            self._distance_vectors(x, key.flip(0)),
            (keys - 1 - distances).clamp(max=keys - 1),
            blocked,
            self.content_bias,
            self.distance_bias,
        )

    def _distance_vectors(self, x: Tensor, distances: Tensor) -> Tensor:
        """(W,) → (W, d), in the dtype of matrix products."""
        vectors = sinusoids(distances.clamp(0, self.current_reach.clamp), self.input_dim, exact_dtype(x))
        return F.dropout(vectors, self.dropout.input, self.training).to(product_dtype(x))


class DenseWeights(NamedTuple):
    """The weights of a layer's two dense layers, for the products of this segment."""

    expand: Tensor
    reduce: Tensor


class TransformerXLLayer(nn.Module):
    """Relative attention over memory and segment, then two dense layers at every position."""

    def __init__(self, dim: int, sizes: LayerSizes, dropout: TransformerDropout, pre_norm: bool) -> None:
        super().__init__()
        self.attention = RelativeAttention(dim, sizes.heads, sizes.head_dim, dropout.attention)
        self.attention_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, sizes.inner_dim)
        self.reduce = nn.Linear(sizes.inner_dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.hidden_dropout, self.pre_norm = dropout.hidden, pre_norm

    @property
    def dropout(self) -> float:
        """The fraction of features that is zeroed now."""
        return self.hidden_dropout if self.training else 0.0

    def forward(
        self,
        x: Stream,
        memory: Tensor,
        around: Surroundings | KernelSurroundings | PlainSurroundings,
        weights: DenseWeights | None = None,
    ) -> Stream:
        """``weights`` are those of the dense layers, if they were converted for all layers at once."""
        if self.pre_norm:
            norm = self.attention_norm
            update = Update(self.attention(norm(x.read), norm(memory.to(x.read.dtype)), around))
            x = add_then_norm(x.past, update, self.feed_forward_norm, self.dropout)
            total = x.past + F.dropout(self._fed_forward(x.read, weights).whole(), self.dropout)
            return Stream(total, total)
        x = add_and_norm(x.past, Update(self.attention(x.read, memory, around)), self.attention_norm, self.dropout)
        return add_and_norm(x.past, self._fed_forward(x.read, weights), self.feed_forward_norm, self.dropout)

    def _fed_forward(self, x: Tensor, weights: DenseWeights | None) -> Update:
        first, second = weights or (None, None)
        return closing(expanded(x, self.expand, self.dropout, first), self.reduce, second)


def _remember(memory: Tensor, hidden: Tensor) -> Tensor:
    """The last M positions of the memory and the segment, (B, M, d), without their graph."""
    kept, new = memory.shape[1], hidden.detach().to(memory.dtype)
    if new.shape[1] >= kept:
        return new[:, new.shape[1] - kept :]
    return torch.cat((memory[:, new.shape[1] :], new), dim=1)
