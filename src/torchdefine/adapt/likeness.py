"""How alike two models are: the vectors that they give to the same sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.files import Progress

SENTENCES_AT_ONCE = 64
LONGEST_SENTENCE = 128
"""In tokens; longer ones are cut."""


@dataclass(frozen=True)
class Likeness:
    """Two sets of vectors of the same sentences, compared."""

    mean_cosine: float
    """Between the two vectors of a sentence, averaged over sentences."""
    rank_correlation: float
    """Spearman's, between the similarities of all pairs of sentences in one set and in the other."""


@torch.no_grad()
def sentence_vectors(model: Any, tokenizer: Any, sentences: Sequence[str], progress: Progress | None = None) -> Tensor:
    """The mean of a model's last hidden states over the tokens of each sentence: (sentences, width), on the CPU.

    Of an encoder–decoder it is the encoder's. Sentences of like length are computed together, which changes nothing.
    """
    body = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    lengths = [len(sentence) for sentence in sentences]
    order = sorted(range(len(sentences)), key=lengths.__getitem__)
    vectors: list[Tensor | None] = [None] * len(sentences)
    for start in range(0, len(order), SENTENCES_AT_ONCE):
        rows = order[start : start + SENTENCES_AT_ONCE]
        batch = tokenizer(
            [sentences[row] for row in rows],
            padding=True,
            truncation=True,
            max_length=LONGEST_SENTENCE,
            return_tensors="pt",
        ).to(model.device)
        hidden = body(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        for row, vector in zip(rows, pooled(hidden, batch["attention_mask"]).float().cpu(), strict=True):
            vectors[row] = vector
        if progress:
            progress(min(start + SENTENCES_AT_ONCE, len(order)), len(order))
    return torch.stack([vector for vector in vectors if vector is not None])


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens that are there: (B, T, m), (B, T) → (B, m)."""
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
    """Rank correlation; equal values do not occur among real similarities, so ties need no care."""
    first, second = (torch.argsort(torch.argsort(values)).double() for values in (one, other))
    first, second = first - first.mean(), second - second.mean()
    return float((first * second).sum() / (first.norm() * second.norm()).clamp_min(1e-30))
