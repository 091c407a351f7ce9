"""What a run says about its text before training: how much there is, how many words, how many unknown."""

from __future__ import annotations

from torchdefine.data import EOS, UNK, Corpus
from torchdefine.data.token_file import LOSS_THAT_COUNTS
from torchdefine.tasks.language.recipe import LanguageRecipe, TextConfig

MANY_UNKNOWN = 0.05
"""Fraction of <unk> in the validation text above which a run suggests a remedy."""


def describe_tokens(corpus: Corpus, data: TextConfig) -> list[str]:
    """The size of the vocabulary and the fraction of unknown words, in a sentence or two."""
    words = corpus.tokenization.kind == "words"
    entries = _describe_words(corpus, data) if words else f"The tokenizer has {len(corpus.tokenization):,} subwords."
    entries += _describe_lost(corpus)
    valid = corpus.splits.get("valid")
    unknown = valid.header.unknown / len(valid) if valid is not None else 0.0
    if valid is None or not (words or unknown):
        return [entries]
    cure = _cure(corpus, data) if unknown > MANY_UNKNOWN else "."
    return [entries, f"Of the validation text {unknown:.1%} is {UNK}{cure}"]


def describe_bands(size: int, recipe: LanguageRecipe) -> list[str]:
    """A sentence on bands that would begin beyond the vocabulary."""
    found = []
    for section in ("embedding", "output"):
        cutoffs = getattr(getattr(recipe, section), "cutoffs", ())
        if beyond := [f"{cutoff:,}" for cutoff in cutoffs if cutoff >= size]:
            found.append(f"Beyond the vocabulary, and so left out of {section}.cutoffs: {', '.join(beyond)}.")
    return found


def _describe_lost(corpus: Corpus) -> str:
    """A sentence after another one, where the tokens do not tell the whole text."""
    lost = max(text.header.lost_share or 0.0 for text in corpus.splits.values())
    if lost < LOSS_THAT_COUNTS:
        return ""
    return (
        f" It loses {lost:.1%} of the characters of the text, by dropping or changing them, so that bits per byte come "
        "out too low: use a tokenizer that keeps them, as byte-level ones do."
    )


def _describe_words(corpus: Corpus, data: TextConfig) -> str:
    size, different = len(corpus.tokenization), corpus.different_words
    if different is None:
        return f"The vocabulary has {size:,} entries."
    words = size - 2
    if words == different:
        return f"The vocabulary has {size:,} entries: all {words:,} different words of the text, {UNK} and {EOS}."
    by = " and ".join(f"{name} {value:,}" for name, value in _cuts(corpus, data).items())
    return (
        f"The vocabulary is cut by {by} to {size:,} entries: the {words:,} most frequent of the text's {different:,} "
        f"different words, {UNK} and {EOS}."
    )


def _cuts(corpus: Corpus, data: TextConfig) -> dict[str, int]:
    """The settings that keep words of the training text out of the vocabulary."""
    size = len(corpus.tokenization)
    if size - 2 == corpus.different_words:
        return {}
    by_size = {"data.max_size": data.max_size} if data.max_size is not None and size == data.max_size else {}
    return by_size | ({"data.min_count": data.min_count} if data.min_count > 1 else {})


def _cure(corpus: Corpus, data: TextConfig) -> str:
    """The end of the sentence on many unknown words."""
    tokens, cuts = corpus.tokenization, _cuts(corpus, data)
    if tokens.kind == "subwords":
        return ": use a tokenizer that knows this text."
    ways = ["a larger data.max_size (none keeps every word)"] if "data.max_size" in cuts else []
    ways += ["a smaller data.min_count"] if "data.min_count" in cuts else []
    if not ways and tokens.counts is not None and tokens.unk_id is not None and tokens.counts[tokens.unk_id]:
        return ", which stands in the training text itself."
    return f": use {', '.join(ways)}{', or ' if ways else ''}subwords by data.tokenizer."
