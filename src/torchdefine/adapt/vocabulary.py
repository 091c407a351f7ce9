"""Which tokens a smaller model keeps: all, those that a text uses, or whichever measures better (extra ``hf``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchdefine.adapt.behaviour import Behaviour
from torchdefine.adapt.purposes import Purpose
from torchdefine.adapt.sentences import SENTENCES_AT_ONCE, encode_batch, sentence_batches, token_counts
from torchdefine.errors import UserError

Vocabulary = Literal["keep", "trim", "auto"]

_OF_A_TOKENIZER = "tokenizer*.json vocab.* merges.txt added_tokens.json special_tokens_map.json *.spm"
_OF_A_TOKENIZER += " tokenizer.model spiece.model *.bpe.model"
NEARNESS = 1e-3
"""Of the vectors of a trimmed model to the old ones, relative; the same tokens differ by rounding only."""


@dataclass(frozen=True)
class Coverage:
    """What a trimmed tokenizer does to sentences that it was not trimmed for."""

    tokens_kept: float
    """The share of tokens, as the old tokenizer makes them, that are still there."""
    sentences_alike: float
    """The share of sentences that are split as before."""
    lengthened: float
    """New tokens for each old one, less 1."""
    unknown: float
    """The share of unknown tokens, less that before."""

    def __str__(self) -> str:
        return (
            f"{self.tokens_kept:.2%} of the old tokens are kept; {self.sentences_alike:.1%} of the sentences have the "
            f"same tokens as before; there are {self.lengthened:.2%} more tokens; {self.unknown:.2%} more are unknown."
        )


@dataclass(frozen=True)
class KeptVocabulary:
    """The tokens of a smaller model, and what its tokenizer takes on disk."""

    choice: str
    """keep or trim."""
    tokens: tuple[int, int]
    """Before and after."""
    tokenizer_bytes: tuple[int, int]
    """Before and after."""
    tried: dict[str, float]
    """What each choice came to on the sentences that candidates are compared on."""
    coverage: Coverage | None
    """Of the held-out sentences, if tokens are missing."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        before, after = (size / 1e6 for size in self.tokenizer_bytes)
        others = ", ".join(f"{name} {quality:.4f}" for name, quality in self.tried.items())
        compared = f" Compared on the sentences for choosing: {others}." if len(self.tried) > 1 else ""
        if self.coverage is None:
            return f"Vocabulary: all {self.tokens[1]:,} tokens are kept.{compared}"
        return (
            f"Vocabulary: {self.tokens[0]:,} → {self.tokens[1]:,} tokens. Tokenizer files: {before:,.2f} → "
            f"{after:,.2f} MB, not part of the budget.{compared} In the held-out sentences: {self.coverage}"
        )


@dataclass(frozen=True, eq=False)
class Version:
    """A model of transformers with its tokenizer, whole or trimmed."""

    name: Literal["keep", "trim"]
    model: Any
    tokenizer: Any
    whole: Version | None = None
    """What it was trimmed from; the outputs of that are what counts."""
    old_ids: list[int] | None = None
    """Of a trimmed one, the former id of every token."""

    def behaviour(self, purpose: Purpose, place: str, sentences: Sequence[str]) -> Behaviour:
        """How the table at ``place`` is judged, by what the whole model gives for these sentences.

        Sentences of like length are computed together, which saves much time.
        """
        sentences = sorted(sentences, key=len)
        batches = purpose.batches(self.model, self.tokenizer, sentences)
        wanted = None if self.whole is None else self.whole.behaviour(purpose, place, sentences)
        return Behaviour(self.model, place, purpose.encode, batches, wanted, purpose.agreement)

    @property
    def described(self) -> str:
        """The end of the name of a stage."""
        return "" if self.whole is None else f", trimmed to {len(self.tokenizer):,} tokens"

    def saved(self, folder: Path, held_out: Sequence[str], tried: dict[str, float]) -> KeptVocabulary:
        """Put a trimmed tokenizer into a folder where a copy of the old one lies; what came of the vocabulary."""
        before, found = tokenizer_bytes(folder), None
        if self.whole is not None and self.old_ids is not None:
            for path in tokenizer_files(folder):
                path.unlink()
            self.tokenizer.save_pretrained(folder)
            found = coverage(self.whole.tokenizer, self.tokenizer, self.old_ids, held_out)
        tokens = (len((self.whole or self).tokenizer), len(self.tokenizer))
        return KeptVocabulary(self.name, tokens, (before, tokenizer_bytes(folder)), tried, found)


def coverage(before: Any, after: Any, old_ids: Sequence[int], sentences: Sequence[str]) -> Coverage:
    """How two tokenizers split sentences; ``old_ids`` are the numbers in the first of the second's tokens."""
    old, new = (tokenizer(list(sentences), verbose=False)["input_ids"] for tokenizer in (before, after))
    flat_old, flat_new = ([id_ for row in rows for id_ in row] for rows in (old, new))
    kept = set(old_ids)
    alike = sum([old_ids[id_] for id_ in row] == wanted for wanted, row in zip(old, new, strict=True))
    unknown = flat_new.count(after.unk_token_id) / len(flat_new) - flat_old.count(before.unk_token_id) / len(flat_old)
    return Coverage(
        sum(id_ in kept for id_ in flat_old) / len(flat_old),
        alike / len(old),
        len(flat_new) / len(flat_old) - 1,
        unknown,
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """What a tokenizer consists of on disk."""
    return sorted({path for pattern in _OF_A_TOKENIZER.split() for path in folder.glob(pattern)})


def tokenizer_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in tokenizer_files(folder))


def versions_of(whole: Version, sentences: Sequence[str], vocabulary: Vocabulary) -> list[Version]:
    """What is to be tried: the model as it is, or with the tokens of these sentences, or both."""
    trimmed = [] if vocabulary == "keep" else [_trimmed(whole, sentences)]
    return trimmed if vocabulary == "trim" else [whole, *trimmed]


@torch.no_grad()
def _trimmed(whole: Version, sentences: Sequence[str]) -> Version:
    from torchdefine.adapt.trimming import trim_vocabulary  # needs transformers, and this module's names do not

    rows = whole.model.get_input_embeddings().num_embeddings
    used = token_counts(whole.tokenizer, sentences, rows).nonzero().flatten().tolist()
    made = trim_vocabulary(whole.model, whole.tokenizer, used)
    trimmed = Version("trim", made.model, made.tokenizer, whole, made.old_ids)
    before, after = (
        encode_batch(one.model, sentence_batches(one.model, one.tokenizer, sentences[:SENTENCES_AT_ONCE])[0]).float()
        for one in (whole, trimmed)
    )
    if not nn.functional.mse_loss(after, before).sqrt() <= NEARNESS * before.square().mean().sqrt():
        raise UserError(
            "Without unused tokens this model gives other vectors for the same sentences, so something in it depends "
            "on the numbers of tokens: keep its vocabulary."
        )
    return trimmed
