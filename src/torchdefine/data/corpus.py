"""A corpus: its splits as memory-mapped token files and the tokenization they were made with.

A text is encoded once, into a folder of the cache whose name is a hash of the source files (path, size, time
of change) and of the settings:

    corpus.json                                   the format version, the name, the splits, and, if the vocabulary
                                                  was made of the training text, how; written last
    vocab.txt or tokenizer.json                   the tokenization
    train.tokens  valid.tokens  test.tokens       the splits (see ``token_file``)

Every file appears whole or not at all, and equal inputs give equal files, so processes that encode the same
corpus at the same time do not harm each other. Such a folder holds all that training needs: a caller may have it made
outside the cache, take it to another machine and name it there in place of the text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torchdefine.data.text_files import find_splits, read_text
from torchdefine.data.token_file import TokenFile, write_token_file
from torchdefine.data.tokenization import Tokenization, load_tokenization
from torchdefine.data.tokenizer import TOKENIZER_FILE, SubwordTokenizer
from torchdefine.data.vocabulary import EOS, UNK, Vocabulary, split_words
from torchdefine.errors import UserError
from torchdefine.files import Progress, atomic_file, cache_folder, new_folder
from torchdefine.spelling import option

MANIFEST_FILE = "corpus.json"
VERSION = 1
SUBWORD_COUNTS = 2
"""A cached text of subwords is encoded again where its header may count unknown and lost text wrongly, as before 2."""


@dataclass(frozen=True)
class WordRule:
    """Which words of a training text enter its vocabulary: how often they must occur, and how many there may be."""

    min_count: int = 1
    max_size: int | None = None

    def __str__(self) -> str:
        return f"data.min_count {self.min_count} and data.max_size {self.max_size or 'none'}"


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
    """None where the vocabulary was not made of the training text, or the rule was not recorded."""

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open a folder that ``encode_corpus`` filled."""
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
            name, version, splits = manifest["name"], manifest["version"], manifest["splits"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} is not a folder with an encoded corpus: {MANIFEST_FILE} is missing.") from error
        if version != VERSION:
            raise UserError(
                f"The encoded corpus in {folder} has format version {version}, but this torchdefine reads "
                f"version {VERSION}: encode the text again; a folder of the cache may be deleted for that."
            )
        tokenization, rule = load_tokenization(folder), manifest.get("word_rule")
        corpus = cls(
            name,
            folder,
            tokenization,
            {split: TokenFile.open(_token_path(folder, split)) for split in splits},
            manifest.get("different_words"),
            None if rule is None else WordRule(**rule),
        )
        for file in corpus.splits.values():
            if file.header.vocabulary_sha256 != tokenization.sha256:
                raise UserError(
                    f"{file.path} was made with another vocabulary than the one beside it: "
                    f"delete the folder {folder} so that the text is encoded again."
                )
        return corpus


def encode_corpus(
    source: str | Path,
    cache: str | Path | None = None,
    *,
    min_count: int = 1,
    max_size: int | None = None,
    tokenizer: str | Path | None = None,
    vocabulary: Tokenization | None = None,
    split: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Encode the texts of a folder, or open them from the cache where that has been done before.

    The vocabulary is made of the words of the training text, unless ``tokenizer`` names a tokenizer file or
    ``vocabulary`` is one that exists already; with the latter the folder need not have a training text, and with one
    ``split`` the others are not read. A file in place of a folder is that split.

    With ``out`` the files go into that new folder, which may be taken elsewhere. Given as ``source``, such a folder is
    opened after a check that it was encoded as the caller wants it.
    """
    _check_choice(min_count, max_size, tokenizer, vocabulary)
    if split is not None and vocabulary is None:
        raise UserError("One split alone is encoded with a vocabulary that exists already: give it.")
    source, rule = Path(source), WordRule(min_count, max_size)
    chosen = vocabulary if tokenizer is None else SubwordTokenizer.load(tokenizer)
    if is_encoded(source):
        if out is not None:
            raise UserError(f"{source} is encoded already: copy the folder, or name that of its text.")
        return _encoded_elsewhere(source, rule, chosen, split)
    if split is not None and source.is_file():
        texts = {split: [source]}
    else:
        texts = find_splits(source, require_train=vocabulary is None)
    if split is not None:
        texts = {split: _split_of(texts, split, source)}
    name = source.resolve().name
    if out is not None:
        with new_folder(out) as folder:
            _encode(texts, folder, name, rule, chosen, progress)
        return Corpus.open(out)
    counted = [SUBWORD_COUNTS] if chosen is not None and chosen.kind == "subwords" else []
    key = _cache_key(texts, [min_count, max_size, chosen.sha256 if chosen else None, *counted])
    folder = cache_folder(cache) / "corpora" / f"{name}-{key[:16]}"
    if is_encoded(folder):
        try:
            return Corpus.open(folder)
        except UserError:
            pass  # a damaged cache is made again
    _encode(texts, folder, name, rule, chosen, progress)
    return Corpus.open(folder)


def is_encoded(folder: Path) -> bool:
    """Whether a folder has a corpus that ``encode_corpus`` wrote, rather than texts."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"version", "name", "splits"} <= manifest.keys()


def _encoded_elsewhere(folder: Path, rule: WordRule, chosen: Tokenization | None, split: str | None) -> Corpus:
    """A corpus that was encoded before, if it fits what is asked for."""
    corpus = Corpus.open(folder)
    if chosen is not None and chosen.sha256 != corpus.tokenization.sha256:
        raise UserError(
            f"{folder} was encoded with another vocabulary than the one that is asked for: name the folder of its text."
        )
    if chosen is None and corpus.tokenization.kind == "subwords":
        raise UserError(
            f"{folder} was encoded by a tokenizer, but none is set: set data.tokenizer to {folder / TOKENIZER_FILE}."
        )
    if chosen is None and corpus.word_rule not in (None, rule):
        raise UserError(
            f"{folder} was encoded with {corpus.word_rule}, but {rule} are asked for: set them alike, or encode the "
            "text again."
        )
    if chosen is None and "train" not in corpus.splits:
        raise UserError(f"{folder} has no training text: it has {', '.join(corpus.splits)}.")
    if split is not None:
        _split_of(corpus.splits, split, folder)
    return corpus


T = TypeVar("T")


def _split_of(splits: Mapping[str, T], split: str, source: Path) -> T:
    if split not in splits:
        raise UserError(
            f"{source} has no {split} text: it has {', '.join(splits)}; name another text by {option('data')}."
        )
    return splits[split]


def _encode(
    texts: Mapping[str, Sequence[Path]],
    folder: Path,
    name: str,
    rule: WordRule,
    chosen: Tokenization | None,
    progress: Progress | None,
) -> None:
    """Fill a folder with token files, their tokenization and, last, the manifest."""
    meter = Meter(_disk_bytes(texts, passes_over_train=1 if chosen else 2), progress)
    manifest: dict[str, Any] = {"version": VERSION, "name": name, "splits": list(texts)}
    tokenization = chosen
    if tokenization is None:
        counts = _count_words(texts["train"], meter.advance)
        tokenization = _make_vocabulary(texts["train"], counts, rule)
        manifest |= {"different_words": len(counts.keys() - {UNK, EOS}), "word_rule": asdict(rule)}
    for split, paths in texts.items():
        write_token_file(_token_path(folder, split), paths, tokenization, meter.advance)
    tokenization.save(folder)
    with atomic_file(folder / MANIFEST_FILE) as file:
        file.write(json.dumps(manifest).encode())
    meter.finish()


def _check_choice(
    min_count: int, max_size: int | None, tokenizer: str | Path | None, vocabulary: Tokenization | None
) -> None:
    if tokenizer is not None and vocabulary is not None:
        raise UserError("A corpus is encoded with a tokenizer file or with an existing vocabulary: give one of them.")
    if (tokenizer is not None or vocabulary is not None) and (min_count, max_size) != (1, None):
        raise UserError(
            "min_count and max_size choose the words of a new vocabulary: "
            "leave them out with a tokenizer file or an existing vocabulary."
        )


def _count_words(texts: Sequence[Path], advance: Callable[[int], None]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        for block in read_text(text):
            counts.update(split_words(block.lines))
            advance(block.disk_bytes)
    return counts


def _make_vocabulary(texts: Sequence[Path], counts: Mapping[str, int], rule: WordRule) -> Vocabulary:
    vocabulary = Vocabulary.from_counts(counts, rule.min_count, rule.max_size)
    if not counts.keys() - {UNK, EOS}:
        raise UserError(f"The training text {texts[0]} has no words, only blank lines: give one that has.")
    if len(vocabulary) < 3:
        raise UserError(
            f"The training text {texts[0]} has no word that is seen {rule.min_count} times or more: "
            "give a longer text or a smaller min_count."
        )
    return vocabulary


def _token_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.tokens"


def _cache_key(texts: dict[str, list[Path]], settings: Sequence[int | str | None]) -> str:
    files = {split: [file_identity(path) for path in paths] for split, paths in texts.items()}
    return hashlib.sha256(json.dumps([VERSION, files, settings]).encode()).hexdigest()


def file_identity(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def _disk_bytes(texts: Mapping[str, Sequence[Path]], passes_over_train: int) -> int:
    sizes = {split: sum(path.stat().st_size for path in paths) for split, paths in texts.items()}
    return sum(sizes.values()) + (passes_over_train - 1) * sizes.get("train", 0)


class Meter:
    """Adds up what is read and tells the caller's progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def advance(self, amount: int) -> None:
        self._done = min(self._done + amount, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        self.advance(self._total - self._done)
