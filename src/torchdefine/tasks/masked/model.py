"""A masked language model: ids → embedding → encoder → head at the hidden places → output."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.token_embedding import count_parameters, distinct_hint, embedded
from torchdefine.errors import check_width
from torchdefine.output import HostHint, Losses, OutputLayer
from torchdefine.output.linear_cross_entropy import Reduction
from torchdefine.tasks.masked.encoder import Encoder


class MaskedModel(nn.Module):
    """Predicts hidden tokens from all others; any embedding and output layer fit."""

    def __init__(self, embedding: TokenEmbedding, encoder: Encoder, output: OutputLayer) -> None:
        super().__init__()
        check_width("embedding", embedding.embedding_dim, "encoder", encoder.width)
        check_width("encoder", encoder.width, "output layer", output.hidden_dim)
        self.embedding: TokenEmbedding = embedding
        self.encoder: Encoder = encoder
        self.head = Head(encoder.width)
        self.output: OutputLayer = output

    def hidden(self, ids: Tensor, visible: Tensor | None = None, distinct: int | None = None) -> Tensor:
        """(B, T) ids, and True where there is no padding → (B, T, width) vectors in context."""
        vectors: Tensor = self.encoder(embedded(self.embedding, ids, distinct), visible)
        return vectors

    def forward(
        self,
        ids: Tensor,
        places: Tensor,
        targets: Tensor,
        state: None = None,
        reduction: Reduction = "mean",
        hint: HostHint | None = None,
    ) -> tuple[Losses, None]:
        """The losses in nats of predicting ``targets`` at ``places``, (B, K) each; -100 does not count.

        Nothing is carried from batch to batch, so the ``state`` that the training loop passes on is None.
        """
        distinct, bands = hint or HostHint()
        chosen = self.at(places, self.hidden(ids, distinct=distinct))  # (B, K, width)
        loss = self.output.loss(chosen, targets, reduction=reduction, hint=bands)
        return Losses(loss, loss), None

    def at(self, places: Tensor, hidden: Tensor) -> Tensor:
        """The head's vectors at some places of each row: what the output layer reads."""
        vectors: Tensor = self.head(hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])))
        return vectors

    def initial_state(self, batch_size: int) -> None:
        return None

    def host_hint(self, ids_and_targets: np.ndarray) -> HostHint:
        """What embedding and output layer need to know before ids and targets, (2, B, T), are on the device."""
        ids, targets = ids_and_targets
        return HostHint(distinct_hint(self.embedding, ids, others=1), self.output.host_hint(targets))

    def embeddings(self) -> dict[str, TokenEmbedding]:
        """The embeddings by the side that they stand on; there is one."""
        return {"": self.embedding}

    def compile_parts(self) -> None:
        """Compile the embedding and the encoder's layers."""
        self.embedding.compile()
        for layer in self.encoder.layers:
            layer.compile()

    def parameters_by_part(self) -> dict[str, int]:
        """The number of parameters in each of the paper's columns; tied ones count once, in input_output."""
        return count_parameters(self, [self.embedding], nn.ModuleList([self.encoder, self.head]))


class Head(nn.Module):
    """What stands between encoder and output: a layer with GELU, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.norm(F.gelu(self.dense(x)))
        return vectors
