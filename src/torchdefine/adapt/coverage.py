"""How much of a text the tokens of a trimmed vocabulary cover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
