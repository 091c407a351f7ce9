"""A corpus: its splits as memory-mapped token files and the tokenization they were made with.

A text is encoded once, by one process, into a folder of the cache whose name is a hash of the source files (path, size,
time of change) and of the settings:

    corpus.json                                   the format version, the name, the splits, and, if the vocabulary
                                                  was made of the training text, how; written last
    vocab.txt or tokenizer.json                   the tokenization
    train.tokens  valid.tokens  test.tokens       the splits (see ``token_file``)

Such a folder holds all that training needs: a caller may have it made outside the cache, take it to another machine and
name it there in place of the text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torchdefine.config import setting
from torchdefine.data.sources import DataConfig, find_splits
from torchdefine.data.text_files import bytes_of, read_texts
from torchdefine.data.token_file import TokenFile, write_token_file
from torchdefine.data.tokenizer import TOKENIZER_FILE, SubwordTokenizer, load_tokenization
from torchdefine.data.vocabulary import EOS, UNK, Tokenization, Vocabulary, split_words
from torchdefine.errors import UserError
from torchdefine.files import Meter, Progress, cache_folder, locked, new_folder, write_text
from torchdefine.spelling import option

MANIFEST_FILE = "corpus.json"
VERSION = 1

E = TypeVar("E")
WordRule = dict[str, Any]
"""``min_count`` and ``max_size``: how often words must occur in the training text, and how many there may be."""


@dataclass(frozen=True)
class TextConfig(DataConfig):
    """The text of a language model."""

    min_count: int = setting(
        1, "Words seen less often than this in the training text become <unk>; for words only.", at_least=1
    )
    max_size: int | None = setting(
        None, "At most this many words in the vocabulary, the most frequent ones; for words only.", at_least=1
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
        manifest = read_manifest(folder / MANIFEST_FILE)
        tokenization = load_tokenization(folder)
        return cls(
            manifest["name"],
            folder,
            tokenization,
            {split: TokenFile.open(folder / f"{split}.tokens", tokenization) for split in manifest["splits"]},
            manifest.get("different_words"),
            manifest.get("word_rule"),
        )


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
    source, rule = Path(source), {"min_count": min_count, "max_size": max_size}
    _check_choice(rule, tokenizer, vocabulary, split)
    chosen = vocabulary if tokenizer is None else SubwordTokenizer.load(tokenizer)
    if has_manifest(source / MANIFEST_FILE):
        if out is not None:
            raise UserError(f"{source} is encoded already: copy the folder, or name that of its text.")
        return _encoded_elsewhere(source, rule, chosen, split)
    if split is not None and source.is_file():
        texts = {split: [source]}
    else:
        texts = find_splits(source, require_train=vocabulary is None)
    if split is not None:
        texts = {split: require_split(texts, split, source)}
    name = source.resolve().name

    def encode(folder: Path) -> None:
        _encode(texts, folder, name, rule, chosen, progress)

    if out is not None:
        with new_folder(out) as folder:
            encode(folder)
        return Corpus.open(out)
    settings = [min_count, max_size, chosen.sha256 if chosen else None]
    return encoded_once(cache_folder(cache) / "corpora" / name, texts, settings, Corpus.open, encode)


def _check_choice(
    rule: WordRule, tokenizer: str | Path | None, vocabulary: Tokenization | None, split: str | None
) -> None:
    if tokenizer is not None and vocabulary is not None:
        raise UserError("A corpus is encoded with a tokenizer file or with an existing vocabulary: give one of them.")
    if (tokenizer is not None or vocabulary is not None) and rule != {"min_count": 1, "max_size": None}:
        raise UserError(
            "min_count and max_size choose the words of a new vocabulary: "
            "leave them out with a tokenizer file or an existing vocabulary."
        )
    if split is not None and vocabulary is None:
        raise UserError("One split alone is encoded with a vocabulary that exists already: give it.")


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
    if chosen is None and corpus.word_rule is not None and corpus.word_rule != rule:
        raise UserError(
            f"{folder} was encoded with {_said(corpus.word_rule)}, but {_said(rule)} are asked for: set them alike, or "
            "encode the text again."
        )
    if chosen is None or split is not None:
        require_split(corpus.splits, split or "train", folder)
    return corpus


def _said(rule: WordRule) -> str:
    return f"data.min_count {rule['min_count']} and data.max_size {rule['max_size'] or 'none'}"


def _encode(
    texts: Mapping[str, Sequence[Path]],
    folder: Path,
    name: str,
    rule: WordRule,
    chosen: Tokenization | None,
    progress: Progress | None,
) -> None:
    """Fill a folder with token files, their tokenization and, last, the manifest."""
    read = chain(*texts.values(), () if chosen else texts["train"])
    meter = Meter(bytes_of(read), progress)
    facts, tokenization = {}, chosen
    if tokenization is None:
        counts: Counter[str] = Counter()
        for block in read_texts(texts["train"], meter.advance):
            counts.update(split_words(block.lines))
        tokenization = Vocabulary.from_counts(counts, **rule)
        if len(tokenization) < 3:
            raise UserError(
                f"The training text {texts['train'][0]} has no word that is seen {rule['min_count']} times or more: "
                "give a longer text or a smaller min_count."
            )
        facts = {"different_words": len(counts.keys() - {UNK, EOS}), "word_rule": rule}
    for split, paths in texts.items():
        write_token_file(folder / f"{split}.tokens", paths, tokenization, meter.advance)
    tokenization.save(folder)
    write_manifest(folder / MANIFEST_FILE, name, list(texts), **facts)
    meter.finish()


def encoded_once(
    place: Path,
    texts: Mapping[str, Sequence[Path]],
    settings: Sequence[Any],
    open_folder: Callable[[Path], E],
    encode: Callable[[Path], None],
) -> E:
    """Open the folder of the cache for texts and settings; one that is not there, or is damaged, is filled first."""
    files = {split: [_identity(path) for path in paths] for split, paths in texts.items()}
    key = hashlib.sha256(json.dumps([VERSION, files, settings]).encode()).hexdigest()
    folder = place.with_name(f"{place.name}-{key[:16]}")
    with suppress(UserError):
        return open_folder(folder)
    with locked(folder):
        with suppress(UserError):  # another process may have filled it
            return open_folder(folder)
        encode(folder)
        return open_folder(folder)


def _identity(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def write_manifest(path: Path, name: str, splits: Sequence[str], **facts: Any) -> None:
    write_text(path, json.dumps({"version": VERSION, "name": name, "splits": list(splits), **facts}))


def has_manifest(path: Path) -> bool:
    """Whether a manifest is there, rather than a file of the user's own that is called the same."""
    with suppress(UserError):
        return bool(read_manifest(path))
    return False


def read_manifest(path: Path) -> dict[str, Any]:
    """What ``write_manifest`` wrote."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        if manifest["version"] == VERSION and {"name", "splits"} <= manifest.keys():
            return manifest
    raise UserError(
        f"{path.parent} is not a folder with an encoded {path.stem}: {path.name} is missing or has another format "
        f"version than {VERSION}; encode the text again."
    )


def require_split(splits: Mapping[str, E], split: str, source: Path) -> E:
    if split not in splits:
        raise UserError(
            f"{source} has no {split} text: it has {', '.join(splits)}; name another text by {option('data')}."
        )
    return splits[split]
