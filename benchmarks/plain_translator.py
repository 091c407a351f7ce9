"""An encoder–decoder of stock modules: nn.Embedding, nn.Transformer, all logits at once."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.context import TransformerConfig
from torchdefine.context.transformer import sinusoids


class PlainTranslator(nn.Module):
    def __init__(
        self, vocabulary: int, width: int, config: TransformerConfig, pad_id: int, label_smoothing: float
    ) -> None:
        super().__init__()
        self.width, self.config, self.pad_id, self.label_smoothing = width, config, pad_id, label_smoothing
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(
            width,
            config.heads,
            config.encoder_layers,
            config.decoder_layers,
            config.hidden_dim,
            config.dropout,
            batch_first=True,
            norm_first=config.norm == "pre",
        )
        self.output = nn.Linear(width, vocabulary)

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
        placed = x * math.sqrt(self.width) + sinusoids(0, x.shape[1], self.width, x)
        return F.dropout(placed, self.config.dropout, self.training)
