"""How alike two models are, by their vectors for the same sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.files import Progress

SENTENCES_AT_ONCE = 32
LONGEST_SENTENCE = 128
"""In tokens; longer ones are cut."""


@dataclass(frozen=True)
class Likeness:
    """Two sets of vectors of the same sentences, compared."""

    mean_cosine: float
    """Between the two vectors of a sentence, averaged over sentences."""
    rank_correlation: float
    """Spearman's, between the similarities of all pairs of sentences in one set and in the other."""


def sentence_batches(model: Any, tokenizer: Any, sentences: Sequence[str]) -> list[dict[str, Tensor]]:
    """Sentences as a model takes them, ``SENTENCES_AT_ONCE`` together, on its device."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batches = []
    for start in range(0, len(sentences), SENTENCES_AT_ONCE):
        batch = tokenizer(
            list(sentences[start : start + SENTENCES_AT_ONCE]),
            padding=True,
            truncation=True,
            max_length=LONGEST_SENTENCE,
            return_tensors="pt",
        )
        batches.append({name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")})
    return batches


def encode_batch(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of a model's last hidden states over the tokens of each sentence, (B, m).

    For an encoder–decoder, those of the encoder.
    """
    body = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    return pooled(body(**batch).last_hidden_state, batch["attention_mask"])


@torch.no_grad()
def sentence_vectors(model: Any, tokenizer: Any, sentences: Sequence[str], progress: Progress | None = None) -> Tensor:
    """``encode_batch`` for many sentences: (sentences, m), float32, on the CPU.

    Sentences of similar length are computed together, which only saves time.
    """
    order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
    batches = sentence_batches(model, tokenizer, [sentences[row] for row in order])
    pieces = []
    for number, batch in enumerate(batches):
        pieces.append(encode_batch(model, batch).float().cpu())
        if progress:
            progress(number + 1, len(batches))
    vectors = torch.cat(pieces)
    return vectors[torch.tensor(order).argsort()]


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over tokens that are not padding: (B, T, m), (B, T) → (B, m)."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)


def likeness(one: Tensor, other: Tensor) -> Likeness:
    """Compare two sets of vectors of the same sentences, (sentences, width) each."""
    if one.shape != other.shape or one.ndim != 2:
        raise UserError(f"Vectors of the shapes {tuple(one.shape)} and {tuple(other.shape)} cannot be compared.")
    cosine = F.cosine_similarity(one, other, dim=-1).mean()
    pairs = torch.triu_indices(len(one), len(one), offset=1)
    first, second = (_similarities(vectors)[pairs[0], pairs[1]] for vectors in (one, other))
    return Likeness(float(cosine), _spearman(first, second))


def _similarities(vectors: Tensor) -> Tensor:
    unit = F.normalize(vectors.double(), dim=-1)
    return unit @ unit.T


def _spearman(one: Tensor, other: Tensor) -> float:
    """Rank correlation; ties need no care, since real similarities are never equal."""
    first, second = (torch.argsort(torch.argsort(values)).double() for values in (one, other))
    first, second = first - first.mean(), second - second.mean()
    return float((first * second).sum() / (first.norm() * second.norm()).clamp_min(1e-30))
