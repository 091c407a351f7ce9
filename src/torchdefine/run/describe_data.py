"""What a run says about its text before training: how much there is, how many words, how many unknown."""

from __future__ import annotations

from torchdefine.data import EOS, UNK, Bitext, Corpus
from torchdefine.data.token_file import LOSS_THAT_COUNTS
from torchdefine.recipe import Recipe
from torchdefine.training.batches import TrainingData

MANY_UNKNOWN = 0.05
"""Share of <unk> in the validation text above which a run suggests a remedy."""


def describe_amount(corpus: Corpus | Bitext, data: TrainingData) -> str:
    """How much text there is, and how often the run will read it, in one sentence."""
    amount, steps = len(corpus.splits["train"]), data.total_steps
    words = "words and line ends" if corpus.tokenization.kind == "words" else "subwords"
    counted = "pairs of sentences" if isinstance(corpus, Bitext) else words
    passes = data.epoch_after(steps)
    shown = f"{passes:,.1f}" if passes >= 0.1 else f"{passes:.1g}"
    return f"The training text has {amount:,} {counted}; {steps:,} steps are {shown} passes over it."


def describe_tokens(corpus: Corpus | Bitext, recipe: Recipe) -> list[str]:
    """The size of the vocabulary and the share of unknown words, in a sentence or two."""
    if isinstance(corpus, Bitext):
        return [_describe_pair(corpus, recipe)]
    words = corpus.tokenization.kind == "words"
    entries = _describe_words(corpus, recipe) if words else f"The tokenizer has {len(corpus.tokenization):,} subwords."
    entries += _describe_lost(corpus)
    valid = corpus.splits.get("valid")
    share = valid.header.unknown / len(valid) if valid is not None else 0.0
    if valid is None or not (words or share):
        return [entries]
    cure = _cure(corpus, recipe) if share > MANY_UNKNOWN else "."
    return [entries, f"Of the validation text {share:.1%} is {UNK}{cure}"]


def describe_bands(corpus: Corpus | Bitext, recipe: Recipe) -> list[str]:
    """A sentence on bands that would begin beyond the vocabulary."""
    section = "embedding" if recipe.embedding.map == "adaptive" else "output"
    banded = section == "embedding" or recipe.output.kind == "adaptive"
    if isinstance(corpus, Bitext) or not banded:
        return []
    size = len(corpus.tokenization)
    beyond = [f"{cutoff:,}" for cutoff in getattr(recipe, section).cutoffs if cutoff >= size]
    return [f"Beyond the vocabulary, and so left out of {section}.cutoffs: {', '.join(beyond)}."] if beyond else []


def describe_measuring(corpus: Corpus | Bitext) -> list[str]:
    """A sentence, before training, for a run that will measure nothing."""
    if {"valid", "test"} & corpus.splits.keys():
        return []
    named = "FOLDER" if isinstance(corpus, Bitext) else "FILE"  # a single file of pairs is a training text
    return [
        "There is neither a valid nor a test text, so nothing will be validated or tested: add one to the folder of "
        f"the text, or measure the run afterwards by `torchdefine eval RUN --data {named}`."
    ]


def _describe_lost(corpus: Corpus) -> str:
    """A sentence after another one, where the tokens do not tell the whole text."""
    lost = max(text.header.lost_share or 0.0 for text in corpus.splits.values())
    if lost < LOSS_THAT_COUNTS:
        return ""
    return (
        f" It loses {lost:.1%} of the characters of the text, by dropping or changing them, so that bits per byte come "
        "out too low: use a tokenizer that keeps them, as byte-level ones do."
    )


def _describe_words(corpus: Corpus, recipe: Recipe) -> str:
    size, different = len(corpus.tokenization), corpus.different_words
    if different is None:
        return f"The vocabulary has {size:,} entries."
    words = size - 2
    if words == different:
        return f"The vocabulary has {size:,} entries: all {words:,} different words of the text, {UNK} and {EOS}."
    by = " and ".join(f"{name} {value:,}" for name, value in _cuts(corpus, recipe).items())
    return (
        f"The vocabulary is cut by {by} to {size:,} entries: the {words:,} most frequent of the text's {different:,} "
        f"different words, {UNK} and {EOS}."
    )


def _cuts(corpus: Corpus, recipe: Recipe) -> dict[str, int]:
    """The settings that keep words of the training text out of the vocabulary."""
    size, data = len(corpus.tokenization), recipe.data
    if size - 2 == corpus.different_words:
        return {}
    by_size = {"data.max_size": data.max_size} if data.max_size is not None and size == data.max_size else {}
    return by_size | ({"data.min_count": data.min_count} if data.min_count > 1 else {})


def _cure(corpus: Corpus, recipe: Recipe) -> str:
    """The end of the sentence on many unknown words."""
    tokens, cuts = corpus.tokenization, _cuts(corpus, recipe)
    if tokens.kind == "subwords":
        return ": use a tokenizer that knows this text."
    ways = ["a larger data.max_size (none keeps every word)"] if "data.max_size" in cuts else []
    ways += ["a smaller data.min_count"] if "data.min_count" in cuts else []
    if not ways and tokens.counts is not None and tokens.unk_id is not None and tokens.counts[tokens.unk_id]:
        return ", which stands in the training text itself."
    return f": use {', '.join(ways)}{', or ' if ways else ''}subwords by data.tokenizer."


def _describe_pair(bitext: Bitext, recipe: Recipe) -> str:
    pair = bitext.tokenization
    sizes = f"{len(pair.target):,}" if pair.joint else f"{len(pair.source):,} and {len(pair.target):,}"
    if recipe.data.tokenizer is not None:
        return f"The tokenizer has {sizes} subwords."
    learned = f"{sizes} subwords were learned from the training text"
    if max(len(pair.source), len(pair.target)) < recipe.bitext.bpe_size:
        return f"{learned}, which has no more: bitext.bpe_size is {recipe.bitext.bpe_size:,}."
    return f"{learned}."
