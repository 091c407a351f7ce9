"""Transformer-XL (Dai et al., 2019): attention that reaches back into a memory of earlier segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import MOST_DEEP, MOST_WIDE, Config, rate, setting
from torchdefine.context.relative_attention import (
    ALIGNMENT,
    KernelSurroundings,
    PlainSurroundings,
    RelativeAttention,
    ScoreLayout,
    Surroundings,
    blocking,
    padded_width,
    round_up,
    sinusoids,
    with_one,
)
from torchdefine.context.residual import DenseWeights, Stream
from torchdefine.context.transformer_xl_layer import AnySurroundings, TransformerXLLayer
from torchdefine.errors import UserError, check_count
from torchdefine.modes import Prepared, untouched
from torchdefine.ops import Scoring, converted, exact_dtype, has_attention_kernel, has_fused_kernels, product_dtype

INIT_STD = 0.02

TransformerXLState = tuple[list[Tensor], Tensor]
"""The inputs of each layer at the last M positions, (B, M, d) each, and how many of them were written, (1,)."""


@dataclass(frozen=True)
class TransformerXLConfig(Config):
    """A Transformer-XL, as wide as its inputs; an output layer of another width has projections."""

    kind: str = "transformer-xl"
    layers: int = setting(1, "Number of layers.", at_least=1, at_most=MOST_DEEP)
    heads: int = setting(8, "Number of attention heads.", at_least=1, at_most=MOST_DEEP)
    head_dim: int | None = setting(
        None, "Width of a head; by default the embedding's width divided by heads.", at_least=1, at_most=MOST_WIDE
    )
    inner_dim: int | None = setting(
        None,
        "Width inside the feed-forward layers; by default 4 × the embedding's width.",
        at_least=1,
        at_most=MOST_WIDE,
    )
    pre_norm: bool = setting(False, "Whether norms come before attention and feed-forward layers, not after.")
    memory: int = setting(
        150, "Number of earlier positions that are kept. With 0, every segment starts without context.", at_least=0
    )
    same_length: bool = setting(False, "Whether every position attends to the same number of positions, memory.")
    clamp: int | None = setting(None, "Largest distance: longer ones are treated as this one.", at_least=1)
    eval_memory: int | None = setting(None, "The memory in evaluation; by default that of training.", at_least=0)
    eval_same_length: bool = setting(False, "The same_length in evaluation.")
    eval_clamp: int | None = setting(None, "The clamp in evaluation.", at_least=1)
    layer_rank: int | None = setting(
        None,
        "Width of an extra vector of each token for every layer. The unit or the projection computes these vectors; "
        "each layer gates its vector and projects it to the layer's width.",
        at_least=1,
        at_most=MOST_WIDE,
    )
    input_dropout: float = rate("Dropout rate of the inputs and of the vectors of distances.")
    hidden_dropout: float = rate("Dropout rate after attention, inside the feed-forward layers and after them.")
    output_dropout: float = rate("Dropout rate of the outputs of the last layer.")
    attention_dropout: float = rate("Dropout rate of the attention weights.")

    def __post_init__(self) -> None:
        super().__post_init__()
        modes = ("", self.memory, self.same_length), ("eval_", self.memory_in_evaluation, self.eval_same_length)
        for mode, memory, same_length in modes:
            self.require(
                memory > 0 or not same_length,
                f"{mode}same_length is true, but with {mode}memory 0 no position would see any: leave one of them out.",
            )

    @property
    def beside_dim(self) -> int:
        """How many numbers an embedding gives beside the input: those of all layers."""
        return self.layers * (self.layer_rank or 0)

    @property
    def memory_in_evaluation(self) -> int:
        return self.memory if self.eval_memory is None else self.eval_memory

    def build(self, input_dim: int, tied_dim: int | None) -> TransformerXL:
        """The context model of a recipe."""
        return TransformerXL(input_dim, self)


class Reach(NamedTuple):
    """How far back a position looks; see ``TransformerXLConfig``."""

    memory: int
    same_length: bool = False
    clamp: int | None = None


class TransformerXL(Prepared):
    """(B, T, input_dim) → (B, T, output_dim), with a memory of fixed length that starts empty.

    Both are equally wide, but where layers have a ``layer_rank``: their vectors stand behind the input, first to last.

    States are made for the mode that the module is in: evaluation may look back farther than training. Shapes never
    depend on values, so that a step can be compiled or captured as a CUDA graph.
    """

    step_length = None

    def __init__(self, input_dim: int, config: TransformerXLConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or TransformerXLConfig()
        dim = input_dim - config.beside_dim
        if dim < 2 or dim % 2:
            problem = f"The vectors are {dim} wide, but position encodings (half sines, half cosines) do not fit"
            raise UserError(f"{problem}: use an even width, such as {max(dim + dim % 2, 2)}.")
        if config.head_dim is None and dim % config.heads:
            raise UserError(f"{config.heads} heads do not divide the width {dim}: set context.head_dim or heads.")
        self.input_dim, self.output_dim = input_dim, dim
        self.reach = Reach(config.memory, config.same_length, config.clamp)
        self.evaluation = Reach(config.memory_in_evaluation, config.eval_same_length, config.eval_clamp)
        self.pre_norm = config.pre_norm
        head_dim = config.head_dim or dim // config.heads
        self.content_bias = nn.Parameter(torch.empty(config.heads, head_dim))
        self.distance_bias = nn.Parameter(torch.empty(config.heads, head_dim))
        self.layers: Any = nn.ModuleList(TransformerXLLayer(dim, config) for _ in range(config.layers))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in the public Transformer-XL code: everything normal and small, norms around 1."""
        for name, parameter in self.named_parameters():
            if (name.endswith("bias") and parameter.ndim == 1) or name.endswith("widen.weight"):
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
        memory = f"a memory of {reach.memory} positions" if reach.memory else "no memory"
        return memory + (f" ({', '.join(notes)})" if notes else "")

    @contextmanager
    def remembering(self, memory: int | None = None, clamp: int | None = None) -> Iterator[None]:
        """Change for a while how far evaluation looks back; None leaves a setting as it is."""
        before = self.evaluation
        memory = before.memory if memory is None else memory
        if memory != 0 or before.same_length:
            check_count("The memory of an evaluation", memory)
        if clamp is not None:
            check_count("The clamp of an evaluation", clamp)
        self.evaluation = Reach(memory, before.same_length, clamp or before.clamp)
        try:
            yield
        finally:
            self.evaluation = before

    def keep_segment(self, length: int) -> None:
        """Remember ``length`` positions in evaluation if it has no memory: steps then go on within one segment."""
        if self.evaluation.memory == 0:
            self.evaluation = self.evaluation._replace(memory=length)

    def initial_state(self, batch_size: int) -> TransformerXLState:
        """Empty memories; under autocast in its dtype, since only products read them and would round them anyway."""
        shape = (batch_size, self.current_reach.memory, self.output_dim)
        dtype = self.content_bias.dtype if self.pre_norm else product_dtype(self.content_bias)
        memories = [self.content_bias.new_zeros(shape, dtype=dtype) for _ in self.layers]
        return memories, torch.zeros(1, dtype=torch.long, device=self.content_bias.device)

    def forward(self, x: Tensor, state: TransformerXLState) -> tuple[Tensor, TransformerXLState]:
        """The outputs, and the memory after the last position, cut off from the graph."""
        around = self.surroundings(x, state[0][0].shape[1], state[1])
        own, beside = self._split(x)
        hidden = F.dropout(own, self.config.input_dropout, self.training)  # (B, T, d)
        hidden, after = self._through(hidden, beside, state, around, _remember)
        return F.dropout(hidden, self.config.output_dropout, self.training), after

    def step(self, x: Tensor, state: TransformerXLState) -> tuple[Tensor, TransformerXLState]:
        """A few positions, (B, T, input_dim), as ``forward`` in evaluation; see ``ContextModel``."""
        if not self.fused:
            return self.forward(x, state)
        around, length = self._for_a_step(x, state[0][0].shape[1], state[1]), x.shape[1]

        def remember(memory: Tensor, hidden: Tensor) -> Tensor:
            return torch.cat((memory, hidden.to(memory.dtype)), dim=1)[:, length:]  # (B, M, d) for every length

        return self._through(*self._split(x), state, around, remember)

    def _split(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The input, (B, T, d), and the vector of every layer, (B, T, layer_rank), where layers have one."""
        if self.config.layer_rank is None:
            return x, [None] * len(self.layers)
        own, beside = x.split([self.output_dim, self.config.beside_dim], dim=-1)
        return own, beside.chunk(len(self.layers), dim=-1)

    def _through(
        self,
        x: Tensor,
        beside: Sequence[Tensor | None],
        state: TransformerXLState,
        around: AnySurroundings,
        remember: Callable[..., Tensor],
    ) -> tuple[Tensor, TransformerXLState]:
        """All layers, and what ``remember`` makes of each one's memory and input."""
        memories, filled = state
        stream, after = Stream(x, x), []
        for layer, memory, weights, own in zip(self.layers, memories, self._dense_weights(x), beside, strict=True):
            after.append(remember(memory, stream.past if self.config.pre_norm else stream.read))
            stream = layer(stream, memory, around, weights, own)  # (B, T, d)
        return stream.past, (after, (filled + x.shape[1]).clamp(max=memories[0].shape[1]))

    @property
    def step_notes(self) -> list[str]:
        notes = [f"`filled` is the number of positions written so far, of {self.evaluation.memory} in the memory."]
        if not self.evaluation.same_length:
            notes.append(
                "Once the memory is full, later tokens of a long `ids` see more of the past than in steps of one "
                "token. So the length matters, as in the model."
            )
        return notes

    def state_tensors(self) -> dict[str, int]:
        return {**{f"memory_{layer}": 1 for layer in range(len(self.layers))}, "filled": self.evaluation.memory + 1}

    def describe(self) -> str:
        return f"a Transformer-XL of {len(self.layers)} layers with {self.carried}"

    def prepare(self, on: bool = True) -> None:
        """All parts together; but weights of layers that torch.compile runs are taken by these layers alone."""
        plain = on and untouched(self, TransformerXLLayer, RelativeAttention, nn.Linear, nn.LayerNorm)
        for layer in self.layers:
            layer.fused = layer.attention.fused = plain
        self.fused = plain and not any(layer._compiled_call_impl for layer in self.layers)

    def compile_layers(self) -> None:
        """Compile the layers one at a time, so that all of them share what is compiled once."""
        for layer in self.layers:
            layer.compile()
        self.prepare(self.fused)

    def _dense_weights(self, x: Tensor) -> list[DenseWeights | None]:
        """Every layer's dense weights in the dtype of the products; autocast would convert them one by one."""
        if not (self.fused and has_fused_kernels(x)):
            return [None] * len(self.layers)
        linears = [linear for layer in self.layers for linear in (layer.expand, layer.reduce)]
        halves = converted([linear.weight for linear in linears], product_dtype(x))
        return list(zip(halves[::2], halves[1::2], strict=True))

    def surroundings(self, x: Tensor, memory: int, filled: Tensor) -> Surroundings | KernelSurroundings:
        """What every layer must know of a segment (B, T, d) after a memory with ``filled`` positions written."""
        width, dtype = padded_width(self.content_bias.shape[1]), product_dtype(x)
        drops_weights = self.training and self.config.attention_dropout > 0  # our kernels do not
        if not drops_weights and self.fused and has_attention_kernel(x.device, dtype, width):
            return self._for_our_kernels(x, memory, filled)
        return self._for_fused_attention(x, memory, filled)

    def _for_our_kernels(self, x: Tensor, memory: int, filled: Tensor) -> KernelSurroundings:
        dtype, same_length = product_dtype(x), self.current_reach.same_length
        bias, farthest = with_one(self.content_bias).flatten(), memory + x.shape[1] - 1
        distances = torch.arange(farthest, farthest - round_up(farthest + 1, ALIGNMENT), -1, device=x.device)
        return KernelSurroundings(
            self._distance_vectors(x, distances),
            F.pad(bias, (0, 2 * len(bias))).to(dtype),
            self.distance_bias - self.content_bias,
            Scoring(filled, same_length, self.content_bias.shape[1] ** -0.5),
        )

    def _for_fused_attention(self, x: Tensor, memory: int, filled: Tensor) -> Surroundings:
        head_dim, dtype = self.content_bias.shape[1], product_dtype(x)
        layout = ScoreLayout(x.shape[1], memory + x.shape[1])
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
        vectors = sinusoids(distances.clamp(0, self.current_reach.clamp), self.output_dim, exact_dtype(x))
        return F.dropout(vectors, self.config.input_dropout, self.training).to(product_dtype(x))


def _remember(memory: Tensor, hidden: Tensor) -> Tensor:
    """The last M positions of the memory and the segment, (B, M, d), without their graph."""
    kept, new = memory.shape[1], hidden.detach().to(memory.dtype)
    if new.shape[1] >= kept:
        return new[:, new.shape[1] - kept :]
    return torch.cat((memory[:, new.shape[1] :], new), dim=1)
