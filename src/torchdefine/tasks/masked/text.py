"""The text of a masked language model: subwords from any tokenizer file, or learned from the text, and a mask token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from torchdefine.config import setting
from torchdefine.data.corpus import Corpus, encode_corpus
from torchdefine.data.sources import DataConfig, find_splits, resolve_corpus
from torchdefine.data.tokenizer import SMALLEST_BPE, TOKENIZER_FILE, SubwordTokenizer, train_subwords
from torchdefine.errors import UserError
from torchdefine.files import Progress, cache_folder, locked, sha256_of

MASK = "<mask>"
KNOWN_MASKS = (MASK, "[MASK]")
SPACES = ("Ġ", "▁")
"""What a subword that begins a word begins with, in byte-level and in other tokenizers."""
CONTINUES = "##"
"""What a subword that goes on with a word begins with, in WordPiece."""


@dataclass(frozen=True)
class MaskedTextConfig(DataConfig):
    """The text of a masked language model."""

    bpe_size: int = setting(
        8000, "Number of subwords to learn from the training text if no tokenizer is set.", at_least=SMALLEST_BPE + 1
    )


class MaskedTokenizer(SubwordTokenizer):
    """Subwords with a mask token: that of the file, or ``<mask>``, which is added at its end."""

    def __init__(self, json_text: str) -> None:
        super().__init__(json_text)
        names = [name for name in KNOWN_MASKS if self.tokenizer.token_to_id(name) is not None]
        if not names:
            self.tokenizer.add_special_tokens([MASK])
            super().__init__(self.tokenizer.to_str())
        self.mask = names[0] if names else MASK
        self.mask_id = self.id(self.mask)

    @cached_property
    def is_special(self) -> np.ndarray:
        """(V,): tokens that are no text, among them numbers that no token has."""
        special = np.ones(len(self), dtype=bool)
        special[list(self.tokenizer.get_vocab().values())] = False
        special[[i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special]] = True
        special[[self.pad_id, self.bos_id, self.eos_id, self.mask_id]] = True
        return special

    @cached_property
    def begins_word(self) -> np.ndarray:
        """(V,): whether a token begins a word, rather than going on with the one before."""
        names = {index: name for name, index in self.tokenizer.get_vocab().items()}
        if any(name.startswith(CONTINUES) for name in names.values()):
            begins = [not names.get(i, "").startswith(CONTINUES) for i in range(len(self))]
        else:
            begins = [names.get(i, "").startswith(SPACES) for i in range(len(self))]
        return np.array(begins) | self.is_special


def open_text(config: MaskedTextConfig, progress: Progress | None = None, *, out: str | Path | None = None) -> Corpus:
    """The recipe's text, encoded, in the cache or in a new folder."""
    source = resolve_corpus(config.corpus, progress=progress)
    tokens = tokenizer_of(config, source, progress)
    corpus = encode_corpus(source, vocabulary=tokens, out=out, progress=progress)
    if "train" not in corpus.splits:
        raise UserError(f"{source} has no train text: training needs one.")
    return replace(corpus, tokenization=tokens)


def tokenizer_of(config: MaskedTextConfig, source: Path, progress: Progress | None = None) -> MaskedTokenizer:
    """The file that is set, or that of an encoded text, or subwords learned from the training text, once."""
    if config.tokenizer is not None:
        return MaskedTokenizer.load(config.tokenizer)
    if (source / TOKENIZER_FILE).is_file():
        return MaskedTokenizer.load(source / TOKENIZER_FILE)
    texts = find_splits(source)["train"]
    key = hashlib.sha256(" ".join([str(config.bpe_size), *map(sha256_of, texts)]).encode()).hexdigest()
    file = cache_folder() / "subwords" / f"{source.resolve().name}-{config.bpe_size}-{key[:16]}.json"
    with locked(file.with_suffix("")):
        if not file.is_file():
            learned = train_subwords(texts, config.bpe_size - 1, progress)
            MaskedTokenizer(learned.tokenizer.to_str()).save(file)
    return MaskedTokenizer.load(file)
