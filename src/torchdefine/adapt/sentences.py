"""Sentences of a text, and a model's vectors for them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.data import read_text
from torchdefine.errors import UserError
from torchdefine.files import Progress

FEWEST_SENTENCES = 60
SHORTEST_SENTENCE = 4
"""In words; shorter lines are headings and remnants."""
_END = re.compile(r"(?<=[.!?])\s+")
SENTENCES_AT_ONCE = 32
LONGEST_SENTENCE = 128
"""In tokens; longer ones are cut, and so are those that a model has no positions for."""


class SentenceParts(NamedTuple):
    """The sentences of a text in three parts."""

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
        raise UserError(f"There is no text file {path}: give a file with a sentence or paragraph in each line.")
    found: dict[str, None] = {}
    for block in read_text(path):
        pieces = (piece for line in block.lines for piece in _END.split(line.strip()))
        found.update((piece, None) for piece in pieces if len(piece.split()) >= SHORTEST_SENTENCE)
        if len(found) >= limit:
            break
    sentences = list(found)[:limit]
    if len(sentences) < FEWEST_SENTENCES:
        found_words = f"{len(sentences)} different sentences of {SHORTEST_SENTENCE} words or more"
        raise UserError(f"{path} has {found_words}, but {FEWEST_SENTENCES} are needed: give a longer text.")
    random.Random(0).shuffle(sentences)
    held = min(held_out, len(sentences) // 3)
    chosen_by = min(choosing, len(sentences) // 6)
    return SentenceParts(sentences[held + chosen_by :], sentences[held : held + chosen_by], sentences[:held])


def token_counts(tokenizer: Any, sentences: Sequence[str], vocabulary_size: int) -> Tensor:
    """How often each token occurs, special ones at least once: (V,)."""
    counts = torch.zeros(vocabulary_size, dtype=torch.long)
    for start in range(0, len(sentences), 1_000):
        encoded = tokenizer(list(sentences[start : start + 1_000]), truncation=False, verbose=False)["input_ids"]
        ids = torch.tensor([token for row in encoded for token in row])
        counts += torch.bincount(ids, minlength=vocabulary_size)[:vocabulary_size]
    special = [id_ for id_ in tokenizer.all_special_ids if id_ < vocabulary_size]
    counts[special] = counts[special].clamp(min=1)  # a mask is put into a text later
    return counts


def sentence_batches(
    model: Any, tokenizer: Any, sentences: Sequence[str], at_once: int = SENTENCES_AT_ONCE
) -> list[dict[str, Tensor]]:
    """Sentences as a model takes them, ``at_once`` together, on its device."""
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise UserError(
            "The tokenizer has neither a padding token nor one that ends a text: set its pad_token, and save it again."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    longest, rows = _longest(model), model.get_input_embeddings().num_embeddings
    batches = []
    for start in range(0, len(sentences), at_once):
        some = list(sentences[start : start + at_once])
        batch = tokenizer(some, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        check_has_row(int(batch["input_ids"].max()), rows)
        batches.append({name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")})
    return batches


def check_has_row(token: int, rows: int) -> None:
    if token >= rows:
        raise UserError(
            f"The tokenizer has the token {token}, but the model's table has {rows:,} rows, counted from 0: use the "
            "model's own tokenizer, or resize the model to this one."
        )


def _longest(model: Any) -> int:
    """How many tokens of a sentence are read: ``LONGEST_SENTENCE``, or as many as the model has positions for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return LONGEST_SENTENCE
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
    first = max((row + 1 for row in padding), default=0)  # RoBERTa's count from there
    return min(LONGEST_SENTENCE, positions - first)


def compared_part(model: Any) -> nn.Module:
    """What gives a sentence's vectors: the model without its head, or its encoder where it has a decoder too."""
    part: nn.Module = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    return part


def encode_batch(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states over the tokens of each sentence that are not padding, (B, m)."""
    hidden = compared_part(model)(**batch).last_hidden_state  # (B, T, m)
    weights = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean: Tensor = (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)
    return mean


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
    return torch.cat(pieces)[torch.tensor(order).argsort()]


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's, between the similarities of all pairs of sentences in one set of vectors and in the other."""
    upper = torch.triu_indices(len(one), len(one), offset=1)
    ranks = []
    for vectors in (one, other):
        unit = F.normalize(vectors.double(), dim=-1)
        similarities = (unit @ unit.T)[upper[0], upper[1]]
        rank = similarities.argsort().argsort().double()  # ties need no care: real similarities are never equal
        ranks.append(rank - rank.mean())
    return float((ranks[0] * ranks[1]).sum() / (ranks[0].norm() * ranks[1].norm()).clamp_min(1e-30))
