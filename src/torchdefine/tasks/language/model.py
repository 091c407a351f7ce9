"""A language model: ids → embedding → context → output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchdefine.config import rate, setting
from torchdefine.context import ContextModel, State
from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.features import previous_ids
from torchdefine.embedding.token_embedding import count_parameters, distinct_hint, embedded
from torchdefine.errors import check_width
from torchdefine.ops import exact_dtype, locked_dropout
from torchdefine.output import HostHint, LossConfig, Losses, OutputLayer
from torchdefine.output.linear_cross_entropy import Reduction


@dataclass(frozen=True)
class LanguageLossConfig(LossConfig):
    """What training adds to the plain cross-entropy of a language model; evaluation uses none of it."""

    output_dropout: float = rate(
        "Rate of variational (locked) dropout on the context model's outputs; not for a Transformer-XL."
    )
    activation_penalty: float = setting(0.0, "Weight of the mean square of the output layer's input.", at_least=0)
    temporal_penalty: float = setting(
        0.0, "Weight of the mean square of the change of hidden vectors between positions.", at_least=0
    )


class AfterToken(NamedTuple):
    """What is carried where an embedding reads the token before, too."""

    context: State
    last: Tensor
    """(B, 1): one more than the last id of the segment, so that a text starts from zero."""


class LanguageModel(nn.Module):
    """Predicts every token of a stream from those before it; any embedding, context model and output layer fit."""

    def __init__(
        self,
        embedding: TokenEmbedding,
        context: ContextModel,
        output: OutputLayer,
        loss: LanguageLossConfig | None = None,
    ) -> None:
        super().__init__()
        check_width("embedding", embedding.embedding_dim, "context model", context.input_dim)
        check_width("context model", context.output_dim, "output layer", output.hidden_dim)
        self.embedding: TokenEmbedding = embedding
        self.context: ContextModel = context
        self.output: OutputLayer = output
        self.loss = loss or LanguageLossConfig()
        self.label_smoothing = self.loss.label_smoothing

    @property
    def carried(self) -> str:
        """What evaluation carries from one segment to the next, in words; a context model may say it itself."""
        return getattr(self.context, "carried", "state")

    def initial_state(self, batch_size: int) -> State:
        state = self.context.initial_state(batch_size)
        if not self.embedding.reads_previous:
            return state
        device = next(self.embedding.parameters()).device
        return AfterToken(state, torch.zeros(batch_size, 1, dtype=torch.long, device=device))

    def state_tensors(self) -> dict[str, int]:
        """Names for the tensors of the state, as a context model has them that can be exported."""
        names: dict[str, int] = self.context.state_tensors()  # type: ignore[attr-defined]
        last = {"last_token": self.embedding.num_embeddings + 1} if self.embedding.reads_previous else {}
        return {**names, **last}

    def hidden(self, ids: Tensor, state: State, distinct: int | None = None) -> tuple[Tensor, State]:
        """(B, T) ids, maybe with a bound on how many differ → (B, T, width) vectors in context, and the state after."""
        context, previous, carry = self._unpacked(ids, state)
        if self.embedding.fused and getattr(self.context, "reads_by_position", False):
            # The vectors then lie in the context model's order, without a copy.
            before = None if previous is None else previous.transpose(0, 1)
            vectors = embedded(self.embedding, ids.transpose(0, 1), distinct, before).transpose(0, 1)  # (B, T, m)
        else:
            vectors = embedded(self.embedding, ids, distinct, previous)  # (B, T, m)
        hidden, after = self.context(vectors, context)
        return hidden, carry(after)

    def _unpacked(self, ids: Tensor, state: State) -> tuple[State, Tensor | None, Callable[[State], State]]:
        """The context model's state, the token before each id, and what makes the next state of the context model's."""
        if not self.embedding.reads_previous:
            return state, None, lambda after: after
        previous = previous_ids(ids, state.last - 1)  # (B, T)
        last = ids[:, -1:].to(state.last.dtype) + 1
        return state.context, previous, lambda after: AfterToken(after, last)

    def forward(
        self, ids: Tensor, targets: Tensor, state: State, reduction: Reduction = "mean", hint: HostHint | None = None
    ) -> tuple[Losses, State]:
        """The losses in nats of predicting ``targets`` (B, T), each the token after its id, and the state after."""
        distinct, bands = hint or HostHint()
        hidden, state = self.hidden(ids, state, distinct)
        if not self.training:
            loss = self.output.loss(hidden, targets, reduction=reduction, hint=bands)
            return Losses(loss, loss), state
        config = self.loss
        dropped = locked_dropout(hidden, config.output_dropout, time_dim=1)  # (B, T, width)
        loss = self.output.loss(
            dropped, targets, reduction=reduction, label_smoothing=config.label_smoothing, hint=bands
        )
        exact = exact_dtype(hidden)
        penalty = hidden.new_zeros((), dtype=exact)
        if config.activation_penalty:
            penalty = penalty + config.activation_penalty * dropped.to(exact).square().mean()
        if config.temporal_penalty and hidden.shape[1] > 1:  # of the vectors before dropout
            steps = hidden[:, 1:].to(exact) - hidden[:, :-1].to(exact)
            penalty = penalty + config.temporal_penalty * steps.square().mean()
        return Losses(loss + penalty, loss), state

    def log_prob(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """Log-probabilities of every token after each position: (B, T, V)."""
        hidden, state = self.hidden(ids, state)
        return self.output.log_prob(hidden), state

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """One token further, (B, 1), or a few: log-probabilities of the token after the last, (B, V), and the state.

        The same numbers as ``log_prob`` in evaluation, by the context model's own ``step`` if it has one.
        """
        advance = getattr(self.context, "step", self.context)
        context, previous, carry = self._unpacked(ids, state)
        vectors = self.embedding(ids) if previous is None else self.embedding(ids, previous=previous)
        hidden, after = advance(vectors, context)  # (B, T, width)
        return self.output.log_prob(hidden[:, -1]), carry(after)

    def host_hint(self, targets: np.ndarray) -> HostHint:
        """What embedding and output layer need to know about the targets (B, T) before they are on the device."""
        # The ids are the targets one position later, except for the first of every row and the id used for padding.
        others = targets.shape[0] + 1
        return HostHint(distinct_hint(self.embedding, targets, others), self.output.host_hint(targets))

    def embeddings(self) -> dict[str, TokenEmbedding]:
        """The embeddings by the side that they stand on; a language model has one."""
        return {"": self.embedding}

    def compile_parts(self) -> None:
        """Compile the embedding and, if the context model offers it, its layers."""
        self.embedding.compile()
        if hasattr(self.context, "compile_layers"):
            self.context.compile_layers()

    def parameters_by_part(self) -> dict[str, int]:
        """The number of parameters in each of the paper's columns; tied ones count once, in input_output."""
        return count_parameters(self, [self.embedding], self.context)  # type: ignore[arg-type]
