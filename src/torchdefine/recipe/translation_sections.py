"""The sections of a recipe that concern translation only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torchdefine.data.tokenizer import SMALLEST_BPE, SPECIALS
from torchdefine.errors import UserError
from torchdefine.recipe.settings import setting


@dataclass(frozen=True)
class BitextSettings:
    source: str = setting("en", "The language to translate from, as in the endings of its file names.")
    target: str = setting("de", "The language to translate into, as in the endings of its file names.")
    bpe_size: int = setting(8000, "Tokens of the BPE that is learned from the training text, or of each of the two.")
    joint: bool = setting(True, "One BPE for both languages, or one for each.")
    max_length: int = setting(100, "Training pairs with more tokens on a side are left out.")
    max_ratio: float = setting(
        3.0, "Training pairs are left out where a side has more tokens than this many times the other's, plus 5."
    )
    batch_tokens: int = setting(4096, "Tokens of a batch on its longer side, padding included.")

    def __post_init__(self) -> None:
        for name in ("max_length", "batch_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"bitext.{name} is {getattr(self, name)}, but must be at least 1.")
        if self.bpe_size < SMALLEST_BPE:
            raise UserError(
                f"bitext.bpe_size is {self.bpe_size}, but must be at least {SMALLEST_BPE}: "
                f"the 256 bytes and {', '.join(SPECIALS)}."
            )
        if self.max_ratio < 1:
            raise UserError(f"bitext.max_ratio is {self.max_ratio}, but must be at least 1.")
        if self.source == self.target:
            raise UserError(f"bitext.source and bitext.target are both {self.source!r}: name two languages.")


@dataclass(frozen=True)
class TransformerSettings:
    encoder_layers: int = setting(6, "Layers that read the source.")
    decoder_layers: int = setting(6, "Layers that write the target.")
    heads: int = setting(8, "Attention heads; the width is that of the embedding.")
    hidden_dim: int = setting(2048, "Width of the feed-forward layers.")
    norm: Literal["pre", "post"] = setting("pre", "Layer norms before or after every sub-layer.")
    dropout: float = setting(0.1, "Dropout on the inputs, after every sub-layer and within the feed-forward layers.")
    attention_dropout: float = setting(0.0, "Dropout on the attention weights.")
    scaled: bool = setting(True, "Multiply embeddings by the square root of their width; not for a unit with a norm.")
    share: Literal["nothing", "unit", "embedding"] = setting(
        "nothing", "What the source and the target side have in common; a whole embedding needs a joint BPE."
    )
    source_embedding: dict[str, Any] = setting(
        {}, "What differs from the embedding section in the source side's embedding, such as {unit: none}."
    )


@dataclass(frozen=True)
class BeamSettings:
    size: int = setting(4, "Hypotheses that beam search keeps; 1 is greedy.")
    length_penalty: float = setting(0.6, "Exponent of Wu's length penalty; 0 for none.")
    max_ratio: float = setting(1.5, "A translation has at most this many tokens for each of the source's …")
    max_extra: int = setting(10, "… and this many more.")
    batch_size: int = setting(64, "Sentences searched at once; changes speed, not the result.")

    def __post_init__(self) -> None:
        """As strict as the search itself, which only starts after training."""
        for name in ("size", "max_extra", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"beam.{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("length_penalty", "max_ratio"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"beam.{name} is {getattr(self, name)}, but must be a number and not negative.")
