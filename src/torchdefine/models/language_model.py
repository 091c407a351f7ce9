"""A language model: ids → embedding → context → output."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.output import OutputLayer
from torchdefine.output.linear_cross_entropy import Reduction

State = Any
"""What a context model carries from one segment to the next; tensors in lists, tuples or dicts."""


class ContextModel(Protocol):
    """Vectors in, vectors that know their context out."""

    input_dim: int
    output_dim: int

    def initial_state(self, batch_size: int) -> State: ...

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]: ...


class LanguageModel(nn.Module):
    """Predicts every token of a stream from those before it; any embedding, context model and output layer fit."""

    def __init__(
        self, embedding: TokenEmbedding, context: ContextModel, output: OutputLayer, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        for giver, width, taker, needs in (
            ("embedding", embedding.embedding_dim, "context model", context.input_dim),
            ("context model", context.output_dim, "output layer", output.hidden_dim),
        ):
            if width != needs:
                raise UserError(f"The {giver} gives vectors {width} wide, but the {taker} takes {needs}.")
        self.embedding: TokenEmbedding = embedding
        self.context: ContextModel = context
        self.output: OutputLayer = output
        self.label_smoothing = label_smoothing

    def initial_state(self, batch_size: int) -> State:
        return self.context.initial_state(batch_size)

    @property
    def carried(self) -> str:
        """What goes from one segment to the next in evaluation, in words; a context model may say it itself."""
        return getattr(self.context, "carried", "state")

    def compile_parts(self) -> None:
        """Let torch.compile have the embedding and, where the context model offers them, its layers."""
        self.embedding.compile()
        compile_layers = getattr(self.context, "compile_layers", None)
        if compile_layers is not None:
            compile_layers()

    def hidden(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """(B, T) ids → (B, T, width) vectors for the output layer, and the state to carry on with."""
        vectors = self.embedding(ids)  # (B, T, m)
        return self.context(vectors, state)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        state: State,
        reduction: Reduction = "mean",
        hint: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, State]:
        """The loss in nats of predicting ``targets`` (B, T), each the token after its id, and the state after them."""
        hidden, state = self.hidden(ids, state)
        smoothing = self.label_smoothing if self.training else 0.0
        return self.output.loss(hidden, targets, reduction=reduction, label_smoothing=smoothing, hint=hint), state

    def log_prob(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """Log-probabilities of every token after each position: (B, T, V)."""
        hidden, state = self.hidden(ids, state)
        return self.output.log_prob(hidden), state

    def host_hint(self, targets: np.ndarray) -> tuple[int, ...] | None:
        """What the output layer wants to know of the targets before they are on the device, so that it need not ask."""
        return self.output.host_hint(targets)

    def parameters_by_part(self) -> dict[str, int]:
        """Who owns the parameters, in the paper's columns; tied ones count once, in input_output."""
        unit = self.embedding.unit
        define = sum(p.numel() for p in unit.parameters()) if unit is not None else 0
        context = sum(p.numel() for p in self.context.parameters())  # type: ignore[attr-defined]
        total = sum(p.numel() for p in self.parameters())
        return {"define": define, "context": context, "input_output": total - define - context, "total": total}
