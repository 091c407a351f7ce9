"""From a recipe to its bitext."""

from __future__ import annotations

from pathlib import Path

from torchdefine.data import Bitext, TokenizerPair, encode_bitext, resolve_bitext
from torchdefine.files import Progress
from torchdefine.tasks.translation.recipe import TranslationRecipe


def open_bitext(
    recipe: TranslationRecipe,
    progress: Progress | None = None,
    *,
    data: str | Path | None = None,
    tokenization: TokenizerPair | None = None,
    split: str | None = None,
) -> Bitext:
    """The recipe's bitext, encoded; or another one, with tokenizers that exist already, and maybe one split of it."""
    if tokenization is None and recipe.data.tokenizer is not None:
        tokenization = TokenizerPair.load(recipe.data.tokenizer)
    path = resolve_bitext(recipe.data.corpus if data is None else data)
    return encode_bitext(path, recipe.data, tokenization=tokenization, split=split, progress=progress)
