"""A corpus: its splits as memory-mapped token files and the tokenization they were made with.

A text is encoded once, by one process, into a folder of the cache whose name is a hash of the source files (path, size,
time of change) and of the settings. Such a folder (see ``token_file``) holds all that training needs: a caller may have
it made outside the cache, take it to another machine and name it there in place of the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torchdefine.config import setting
from torchdefine.data.sources import SPLITS, DataConfig, find_splits
from torchdefine.data.text_files import bytes_of, read_texts
from torchdefine.data.token_file import (
    TokenFile,
    TokenWriter,
    encoded_once,
    only,
    open_encoded,
    write_manifest,
)
from torchdefine.data.tokenizer import TOKENIZER_FILE, SubwordTokenizer, load_tokenization
from torchdefine.data.vocabulary import EOS, UNK, Tokenization, Vocabulary, split_words
from torchdefine.errors import UserError
from torchdefine.files import Meter, Progress, atomic_file, cache_folder, check_path, new_folder

MANIFEST_FILE = "corpus.json"

WordRule = dict[str, Any]
"""``min_count`` and ``max_size``: how often words must occur in the training text, and how many there may be."""


@dataclass(frozen=True)
class TextConfig(DataConfig):
    """The text of a language model."""

    min_count: int = setting(
        1, "Words with fewer occurrences in the training text become <unk>. For words only.", at_least=1
    )
    max_size: int | None = setting(
        None, "Largest size of the vocabulary: it keeps the most frequent words. For words only.", at_least=3
    )


@dataclass(frozen=True)
class Corpus:
    """An encoded corpus; ``splits`` has "train", "valid" and "test", as far as the source has them."""

    name: str
    folder: Path
    tokenization: Tokenization
    splits: dict[str, TokenFile]
    different_words: int | None = None
    """Of the training text, <unk> and <eos> aside; None where the vocabulary was not made of them."""
    word_rule: WordRule | None = None
    """Which words of the training text the vocabulary has; None where it was not made of them."""

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open a folder that ``encode_corpus`` filled."""
        folder = Path(folder)
        facts, tokenization, files = open_encoded(folder / MANIFEST_FILE, load_tokenization)
        words = facts.get("different_words"), facts.get("word_rule")
        return cls(facts["name"], folder, tokenization, {split: file for split, (file,) in files.items()}, *words)


def encode_corpus(
    source: str | Path,
    config: TextConfig | None = None,
    cache: str | Path | None = None,
    *,
    vocabulary: Tokenization | None = None,
    split: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Encode the texts of a folder, or open them from the cache where that has been done before.

    The vocabulary is made of the words of the training text, unless the config names a tokenizer file or ``vocabulary``
    is one that exists already; with the latter the folder need not have a training text, and with one ``split`` the
    others are not read. A file in place of a folder is that split.

    With ``out`` the files go into that new folder, which may be taken elsewhere. Given as ``source``, such a folder is
    opened after a check that it was encoded as the caller wants it.
    """
    source, config, chosen = check_path(source), config or TextConfig(), vocabulary
    if vocabulary is None and config.tokenizer is not None:
        chosen = SubwordTokenizer.load(config.tokenizer)
    rule = None if chosen is not None else {"min_count": config.min_count, "max_size": config.max_size}
    if _is_encoded(source):
        if out is not None:
            raise UserError(f"{source} is encoded already: copy the folder, or name that of its text.")
        corpus = Corpus.open(source)
        _check_encoding(corpus, rule, chosen)
        if vocabulary is None or split is not None:
            only(split or "train", corpus.splits, source)
        return corpus
    if split is not None and vocabulary is None:
        raise UserError("One split alone is encoded with a vocabulary that exists already: give it.")
    single = {split: [source]} if split is not None and source.is_file() else None
    texts = only(split, single or find_splits(source, require_train=vocabulary is None), source)
    name = source.resolve().name
    if out is not None:
        with new_folder(out) as folder:
            _encode(texts, folder, name, rule, chosen, progress)
        return Corpus.open(out)
    place, settings = cache_folder(cache) / "corpora" / name, [rule, None if chosen is None else chosen.sha256]
    fill = partial(_encode, texts, name=name, rule=rule, chosen=chosen, progress=progress)
    return encoded_once(place, texts, settings, Corpus.open, fill)


def _is_encoded(folder: Path) -> bool:
    """Whether a manifest is there, rather than a file of the user's own that is called the same."""
    return (folder / MANIFEST_FILE).is_file() and any((folder / f"{split}.tokens").is_file() for split in SPLITS)


def _check_encoding(corpus: Corpus, rule: WordRule | None, chosen: Tokenization | None) -> None:
    """Refuse a corpus that was encoded otherwise than it is asked for."""
    folder = corpus.folder
    if chosen is not None and chosen.sha256 != corpus.tokenization.sha256:
        raise UserError(f"{folder} was encoded with another vocabulary: name the folder of its text.")
    if chosen is None and corpus.tokenization.kind == "subwords":
        file = folder / TOKENIZER_FILE
        raise UserError(f"{folder} was encoded by a tokenizer, but none is set: set data.tokenizer to {file}.")
    if rule and corpus.word_rule and corpus.word_rule != rule:
        own, wanted = (
            f"data.min_count {one['min_count']} and data.max_size {one['max_size'] or 'none'}"
            for one in (corpus.word_rule, rule)
        )
        raise UserError(f"{folder} was encoded with {own}, but {wanted} are asked for: set them alike, or encode anew.")


def _encode(
    texts: Mapping[str, Sequence[Path]],
    folder: Path,
    name: str,
    rule: WordRule | None,
    chosen: Tokenization | None,
    progress: Progress | None,
) -> None:
    """Fill a folder with token files, their tokenization and, last, the manifest."""
    meter = Meter(bytes_of(chain(*texts.values(), texts["train"] if rule else ())), progress)
    facts: dict[str, Any] = {}
    if rule:
        chosen, different_words = _count_words(texts["train"], rule, meter)
        facts = {"different_words": different_words, "word_rule": rule}
    assert chosen is not None
    headers = {}
    for split, paths in texts.items():
        with atomic_file(folder / f"{split}.tokens") as file:
            writer = TokenWriter(file, chosen)
            for block in read_texts(paths, meter.advance):
                lost = chosen.lost_characters(block.lines)
                writer.add(chosen.encode_lines(block.lines), block.raw, len(block.lines), lost)
            headers[split] = {f"{split}.tokens": writer.header(" with ".join(map(str, paths)))}
    chosen.save(folder)
    write_manifest(folder / MANIFEST_FILE, name, chosen.sha256, headers, **facts)
    meter.finish()


def _count_words(texts: Sequence[Path], rule: WordRule, meter: Meter) -> tuple[Vocabulary, int]:
    """The vocabulary of a training text, and how many different words it has."""
    counts: Counter[str] = Counter()
    for block in read_texts(texts, meter.advance):
        counts.update(split_words(block.lines))
    vocabulary = Vocabulary.from_counts(counts, **rule)
    if len(vocabulary) < 3:
        problem = f"The training text {texts[0]} has no word that is seen {rule['min_count']} times or more"
        raise UserError(f"{problem}: give a longer text or a smaller min_count.")
    return vocabulary, len(counts.keys() - {UNK, EOS})
