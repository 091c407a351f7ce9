"""A language model: ids → embedding → context → output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from torchdefine.context import ContextModel, State
from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.distinct import count_distinct
from torchdefine.errors import UserError
from torchdefine.ops import exact_dtype, locked_dropout
from torchdefine.output import OutputLayer
from torchdefine.output.linear_cross_entropy import Reduction


@dataclass(frozen=True)
class LossOptions:
    """What training adds to the plain cross-entropy; evaluation uses none of it."""

    label_smoothing: float = 0.0
    output_dropout: float = 0.0
    """On the context model's outputs, with one mask for all positions."""
    activation_penalty: float = 0.0
    """Weight of the mean square of the output layer's inputs (Merity et al.'s α)."""
    temporal_penalty: float = 0.0
    """Weight of the mean square of the step from one position's hidden vector to the next's (their β)."""

    def __post_init__(self) -> None:
        if not 0 <= self.output_dropout < 1:
            raise UserError(f"The output dropout is {self.output_dropout}, but must be at least 0 and below 1.")
        for name in ("activation_penalty", "temporal_penalty"):
            if getattr(self, name) < 0:
                raise UserError(f"The {name} is {getattr(self, name)}, but must not be negative.")


class Losses(NamedTuple):
    """The loss that a step minimises, and the one to report."""

    objective: Tensor
    cross_entropy: Tensor
    """Without penalties; in training it is smoothed where the model smooths labels."""


class HostHint(NamedTuple):
    """What the host knows about a batch, so that the device need not be asked; larger numbers work as well."""

    distinct: int | None = None
    """How many different ids there can be; None if the embedding does not use it."""
    bands: tuple[int, ...] | None = None
    """The output layer's ``host_hint``."""


class LanguageModel(nn.Module):
    """Predicts every token of a stream from those before it; any embedding, context model and output layer fit."""

    def __init__(
        self,
        embedding: TokenEmbedding,
        context: ContextModel,
        output: OutputLayer,
        options: LossOptions | None = None,
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
        self.options = options or LossOptions()

    def initial_state(self, batch_size: int) -> State:
        return self.context.initial_state(batch_size)

    @property
    def carried(self) -> str:
        """What evaluation carries from one segment to the next, in words; a context model may say it itself."""
        return getattr(self.context, "carried", "state")

    def compile_parts(self) -> None:
        """Compile the embedding and, if the context model offers it, its layers."""
        self.embedding.compile()
        compile_layers = getattr(self.context, "compile_layers", None)
        if compile_layers is not None:
            compile_layers()

    def hidden(self, ids: Tensor, state: State, distinct: int | None = None) -> tuple[Tensor, State]:
        """(B, T) ids → (B, T, width) vectors for the output layer, and the state to carry on with.

        ``distinct``, where known, is a bound on how many different ids there are.
        """
        by_position = getattr(self.context, "reads_by_position", False) and self.embedding.knows_tokens_only
        if by_position:  # the vectors then lie in the context model's order, without a copy
            vectors = self.embedding(ids.transpose(0, 1), distinct).transpose(0, 1)  # (B, T, m)
        else:
            vectors = self.embedding(ids, distinct)  # (B, T, m)
        return self.context(vectors, state)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        state: State,
        reduction: Reduction = "mean",
        hint: HostHint | None = None,
    ) -> tuple[Losses, State]:
        """The losses in nats of predicting ``targets`` (B, T), each the token after its id, and the state after."""
        distinct, bands = hint or HostHint()
        hidden, state = self.hidden(ids, state, distinct)
        if not self.training:
            loss = self.output.loss(hidden, targets, reduction=reduction, hint=bands)
            return Losses(loss, loss), state
        dropped = locked_dropout(hidden, self.options.output_dropout, time_dim=1)  # (B, T, width)
        loss = self.output.loss(
            dropped, targets, reduction=reduction, label_smoothing=self.options.label_smoothing, hint=bands
        )
        return Losses(loss + self._penalties(hidden, dropped), loss), state

    def _penalties(self, hidden: Tensor, dropped: Tensor) -> Tensor:
        """Activation regularisation takes the vectors after dropout, the temporal kind those before."""
        total = hidden.new_zeros((), dtype=exact_dtype(hidden))
        if self.options.activation_penalty:
            total = total + self.options.activation_penalty * dropped.to(total.dtype).square().mean()
        if self.options.temporal_penalty and hidden.shape[1] > 1:
            steps = hidden[:, 1:].to(total.dtype) - hidden[:, :-1].to(total.dtype)
            total = total + self.options.temporal_penalty * steps.square().mean()
        return total

    def log_prob(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """Log-probabilities of every token after each position: (B, T, V)."""
        hidden, state = self.hidden(ids, state)
        return self.output.log_prob(hidden), state

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """One token further, (B, 1), or a few: log-probabilities of the token after the last, (B, V), and the state.

        The same numbers as ``log_prob`` in evaluation, by the context model's own ``step`` if it has one.
        """
        advance = getattr(self.context, "step", self.context)
        hidden, state = advance(self.embedding(ids), state)  # (B, T, width)
        return self.output.log_prob(hidden[:, -1]), state

    def host_hint(self, targets: np.ndarray) -> HostHint:
        """What embedding and output layer need to know about the targets (B, T) before they are on the device.

        The ids are the targets one position later, except for the first of every row and the id used for padding.
        """
        bands = self.output.host_hint(targets)
        if not self.embedding.shares_equal_tokens:
            return HostHint(None, bands)
        return HostHint(count_distinct(targets, self.embedding.num_embeddings) + targets.shape[0] + 1, bands)

    def embeddings(self) -> dict[str, TokenEmbedding]:
        """The embeddings by the side that they stand on; a language model has one."""
        return {"": self.embedding}

    def parameters_by_part(self) -> dict[str, int]:
        """The number of parameters in each of the paper's columns; tied ones count once, in input_output."""
        return count_parameters(self, [self.embedding], self.context)  # type: ignore[arg-type]


def count_parameters(model: nn.Module, embeddings: Iterable[TokenEmbedding], context: nn.Module) -> dict[str, int]:
    """The parameters of a model's units, of its context model, and of all else; shared ones count once."""
    units = {p for embedding in embeddings if embedding.unit is not None for p in embedding.unit.parameters()}
    define, within = sum(p.numel() for p in units), sum(p.numel() for p in context.parameters())
    total = sum(p.numel() for p in model.parameters())
    return {"define": define, "context": within, "input_output": total - define - within, "total": total}
