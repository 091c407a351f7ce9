"""An encoder–decoder of stock modules: nn.Embedding, nn.Transformer, all logits at once."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.context.transformer import TransformerShape, sinusoids


class PlainTranslator(nn.Module):
    def __init__(self, vocabulary: int, shape: TransformerShape, pad_id: int, label_smoothing: float) -> None:
        super().__init__()
        self.shape, self.pad_id, self.label_smoothing = shape, pad_id, label_smoothing
        self.source, self.target = nn.Embedding(vocabulary, shape.width), nn.Embedding(vocabulary, shape.width)
        self.transformer = nn.Transformer(
            shape.width,
            shape.heads,
            shape.encoder_layers,
            shape.decoder_layers,
            shape.hidden_dim,
            shape.dropout,
            batch_first=True,
            norm_first=shape.norm == "pre",
        )
        self.output = nn.Linear(shape.width, vocabulary)

    def forward(self, source: Tensor, inputs: Tensor, targets: Tensor, state: None) -> tuple[Tensor, None]:
        padding = source == self.pad_id  # (B, S)
        causal = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        hidden = self.transformer(
            self._placed(self.source(source)),
            self._placed(self.target(inputs)),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )  # (B, T, m)
        logits = self.output(hidden).flatten(0, 1).float()  # (B · T, V)
        return F.cross_entropy(logits, targets.flatten(), label_smoothing=self.label_smoothing), state

    def _placed(self, x: Tensor) -> Tensor:
        placed = x * math.sqrt(self.shape.width) + sinusoids(0, x.shape[1], self.shape.width, x)
        return F.dropout(placed, self.shape.dropout, self.training)
