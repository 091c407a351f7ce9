"""Sentences of a text in three disjoint parts: for fitting, for choosing, for judging."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdefine.data import read_text
from torchdefine.errors import UserError

FEWEST_SENTENCES = 60
SHORTEST_SENTENCE = 4
"""In words; shorter lines are headings and remnants."""
_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class SentenceParts:
    fitting: list[str]
    """For counting tokens, and for distillation."""
    choosing: list[str]
    held_out: list[str]


def sentence_parts(
    path: str | Path, *, choosing: int = 1_000, held_out: int = 2_000, limit: int = 200_000
) -> SentenceParts:
    """The different sentences of a text file (plain or packed), in random but repeatable order, in three parts.

    Lines are cut after full stops. A short text gives a sixth for choosing, and a third to be held out.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no text file {path}: give one with a sentence or paragraph a line.")
    found: dict[str, None] = {}
    for block in read_text(path):
        pieces = (piece for line in block.lines for piece in _END.split(line.strip()))
        found.update((piece, None) for piece in pieces if len(piece.split()) >= SHORTEST_SENTENCE)
        if len(found) >= limit:
            break
    sentences = list(found)[:limit]
    if len(sentences) < FEWEST_SENTENCES:
        raise UserError(
            f"{path} has {len(sentences)} different sentences of {SHORTEST_SENTENCE} words or more, but at least "
            f"{FEWEST_SENTENCES} are needed: give a longer text."
        )
    random.Random(0).shuffle(sentences)
    held = min(held_out, len(sentences) // 3)
    chosen_by = min(choosing, len(sentences) // 6)
    return SentenceParts(sentences[held + chosen_by :], sentences[held : held + chosen_by], sentences[:held])


def token_counts(tokenizer: Any, sentences: Sequence[str], vocabulary_size: int) -> Tensor:
    """How often each token occurs: (V,)."""
    counts = torch.zeros(vocabulary_size, dtype=torch.long)
    for start in range(0, len(sentences), 1_000):
        encoded = tokenizer(list(sentences[start : start + 1_000]), truncation=False, verbose=False)["input_ids"]
        ids = torch.tensor([token for row in encoded for token in row])
        counts += torch.bincount(ids, minlength=vocabulary_size)[:vocabulary_size]
    return counts
