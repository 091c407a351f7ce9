"""A translator: source ids → embedding → encoder; target ids → embedding → decoder → output."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from torchdefine.context.transformer import DecoderState, Transformer
from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.token_embedding import count_parameters, embedded
from torchdefine.errors import UserError, check_width
from torchdefine.output import HostHint, Losses, OutputLayer
from torchdefine.output.linear_cross_entropy import Reduction


class Translator(nn.Module):
    """Predicts every token of a target from the source and the tokens before it.

    Any embedding fits on either side; the two may be the same module, or share their unit. ``pad_id`` fills the ends
    of short sources and is never attended to.
    """

    def __init__(
        self,
        source: TokenEmbedding,
        target: TokenEmbedding,
        transformer: Transformer,
        output: OutputLayer,
        pad_id: int,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check_width("source embedding", source.embedding_dim, "Transformer", transformer.width)
        check_width("target embedding", target.embedding_dim, "Transformer", transformer.width)
        check_width("Transformer", transformer.width, "output layer", output.hidden_dim)
        if output.num_embeddings != target.num_embeddings:
            raise UserError(f"The output has {output.num_embeddings} tokens, the target side {target.num_embeddings}.")
        self.own_source: TokenEmbedding | None = None if source is target else source  # what is shared is saved once
        self.target: TokenEmbedding = target
        self.transformer: Transformer = transformer
        self.output: OutputLayer = output
        self.pad_id = pad_id
        self.label_smoothing = label_smoothing

    @property
    def source(self) -> TokenEmbedding:
        """The embedding of the source side: its own, or the target's."""
        return self.target if self.own_source is None else self.own_source

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) ids → the memory (B, S, m) and where it is not padding (B, S)."""
        visible = source != self.pad_id
        return self.transformer.encode(embedded(self.source, source), visible), visible

    def hidden(self, source: Tensor, inputs: Tensor) -> Tensor:
        """(B, S) and (B, T) ids → (B, T, m) vectors for the output layer."""
        memory, visible = self.encode(source)
        vectors = embedded(self.target, inputs)  # (B, T, m)
        return self.transformer.decode(vectors, memory, visible)

    def forward(
        self,
        source: Tensor,
        inputs: Tensor,
        targets: Tensor,
        state: None = None,
        reduction: Reduction = "mean",
        hint: HostHint | None = None,
    ) -> tuple[Losses, None]:
        """The losses in nats of predicting ``targets`` (B, T), each the token after its input; -100 does not count.

        Nothing is carried from batch to batch, so the ``state`` that the training loop passes on is None.
        """
        hidden = self.hidden(source, inputs)
        smoothing = self.label_smoothing if self.training else 0.0
        bands = (hint or HostHint()).bands
        loss = self.output.loss(hidden, targets, reduction=reduction, label_smoothing=smoothing, hint=bands)
        return Losses(loss, loss), None

    def initial_state(self, batch_size: int) -> None:
        return None

    def start(self, source: Tensor, hypotheses: int = 1) -> DecoderState:
        """Read the sources (B, S) and return the first state for ``step``, with ``hypotheses`` targets for each."""
        memory, visible = self.encode(source)
        return self.transformer.start(memory, visible, hypotheses)

    def step(self, ids: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The last token of every target, (N,) → log-probabilities of the next, (N, V), and the state after it."""
        hidden, state = self.transformer.step(embedded(self.target, ids), state)
        return self.output.log_prob(hidden), state

    def host_hint(self, targets: np.ndarray) -> HostHint:
        """What the output layer needs to know about the targets before they are on the device."""
        return HostHint(bands=self.output.host_hint(targets))

    def embeddings(self) -> dict[str, TokenEmbedding]:
        """The embeddings by the side that they stand on; one that both share is named once."""
        if self.own_source is None:
            return {"both sides": self.target}
        return {"source": self.source, "target": self.target}

    def compile_parts(self) -> None:
        """Compile the embeddings."""
        for embedding in self.embeddings().values():
            embedding.compile()

    def parameters_by_part(self) -> dict[str, int]:
        """The number of parameters in each of the paper's columns; shared or tied ones count once."""
        return count_parameters(self, (self.source, self.target), self.transformer)
