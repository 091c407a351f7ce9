"""A bitext: the pairs of each split as memory-mapped token files, and the tokenizers they were made with.

It is encoded once, into a folder of the cache whose name is a hash of the source files and of the settings:

    bitext.json                                   the format version, the name, the splits and what was left out
    tokenizer.json, or one for each side          see ``tokenizer_pair``
    train.source.tokens  train.target.tokens      the sentences in the same order, each ended by <eos>, which stands
    valid.…  test.…                               nowhere else, so that it marks where each begins and ends

Training pairs that are empty on a side, too long or too unequal are left out; valid and test are kept whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from torchdefine.data.bitext_files import PairedFiles, find_bitext, read_pairs
from torchdefine.data.corpus import Meter, file_identity
from torchdefine.data.token_file import TokenFile, token_file_writer
from torchdefine.data.tokenizer import SubwordTokenizer, check_bpe_size, train_bpe_on
from torchdefine.data.tokenizer_pair import TokenizerPair
from torchdefine.errors import UserError
from torchdefine.files import Progress, atomic_file, cache_folder
from torchdefine.spelling import option

MANIFEST_FILE = "bitext.json"
VERSION = 1
RATIO_SLACK = 5
"""Sentences may differ in length by this many tokens, whatever their ratio."""
_SEARCHED_AT_ONCE = 16 << 20


@dataclass(frozen=True)
class BitextRules:
    """How a bitext is read and which of its training pairs are kept."""

    source: str = "en"
    target: str = "de"
    """The languages, as in the endings of the file names."""
    vocabulary_size: int = 8000
    """Of the BPE, or of each of the two."""
    joint: bool = True
    """One BPE learned on both languages together, or one for each."""
    max_length: int = 100
    """Tokens of a side of a training pair, at most."""
    max_ratio: float = 3.0
    """At most this many tokens on the longer side for each on the shorter, plus ``RATIO_SLACK``."""


@dataclass(frozen=True)
class SentencePairs:
    """One split, encoded: sentence i of ``source`` is translated by sentence i of ``target``."""

    source: TokenFile
    target: TokenFile
    eos_ids: tuple[int, int]

    def __len__(self) -> int:
        return self.source.header.lines

    @cached_property
    def source_ends(self) -> np.ndarray:
        """Where each sentence ends, its ``<eos>`` included, (n,); it begins where the one before ends."""
        return _sentence_ends(self.source, self.eos_ids[0])

    @cached_property
    def target_ends(self) -> np.ndarray:
        return _sentence_ends(self.target, self.eos_ids[1])

    @property
    def tokens_sha256(self) -> str:
        """Equal for the same pairs in the same order."""
        both = self.source.header.tokens_sha256 + self.target.header.tokens_sha256
        return hashlib.sha256(both.encode()).hexdigest()

    @property
    def text_sha256(self) -> str:
        both = self.source.header.text_sha256 + self.target.header.text_sha256
        return hashlib.sha256(both.encode()).hexdigest()

    def verify(self) -> None:
        """Read all the data and compare its hashes to the headers'."""
        self.source.verify()
        self.target.verify()


@dataclass(frozen=True)
class Bitext:
    """An encoded bitext; ``splits`` has "train", "valid" and "test", as far as the source has them."""

    name: str
    folder: Path
    tokenization: TokenizerPair
    splits: dict[str, SentencePairs]
    left_out: int
    """Training pairs that were empty, too long or too unequal."""

    @classmethod
    def open(cls, folder: str | Path) -> Bitext:
        """Open a folder that ``encode_bitext`` filled."""
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
            name, version, splits, left_out = (manifest[k] for k in ("name", "version", "splits", "left_out"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} is not a folder with an encoded bitext: {MANIFEST_FILE} is missing.") from error
        if version != VERSION:
            raise UserError(
                f"The encoded bitext in {folder} has format version {version}, but this torchdefine reads version "
                f"{VERSION}: delete the folder so that the text is encoded again."
            )
        pair = TokenizerPair.load(folder)
        opened = {split: _open_split(folder, split, pair) for split in splits}
        return cls(name, folder, pair, opened, left_out)


def encode_bitext(
    source: str | Path,
    rules: BitextRules,
    cache: str | Path | None = None,
    *,
    tokenization: TokenizerPair | None = None,
    split: str | None = None,
    progress: Progress | None = None,
) -> Bitext:
    """Encode the texts of a folder, or open them from the cache where that has been done before.

    The tokenizers are learned from the training text unless given; with given ones there need be no training text, and
    with one ``split`` the others are not read.
    """
    if tokenization is None:
        check_bpe_size(rules.vocabulary_size)
    path = Path(source)
    texts = find_bitext(path, rules.source, rules.target, require_train=tokenization is None)
    if split is not None:
        if tokenization is None:
            raise UserError("One split alone is encoded with tokenizers that exist already: give them.")
        if split not in texts:
            raise UserError(
                f"{path} has no {split} text: it has {', '.join(texts)}; name another text by {option('data')}."
            )
        texts = {split: texts[split]}
    name = path.resolve().name
    folder = cache_folder(cache) / "bitexts" / f"{name}-{_cache_key(texts, rules, tokenization)[:16]}"
    if (folder / MANIFEST_FILE).is_file():
        try:
            return Bitext.open(folder)
        except UserError:
            pass  # a damaged cache is made again
    sizes = {split: sum(file.stat().st_size for file in files.all) for split, files in texts.items()}
    meter = Meter(sum(sizes.values()) + (0 if tokenization else sizes["train"]), progress)
    pair = tokenization or _learn_tokenizers(texts["train"], rules, meter)
    left_out = 0
    for split, files in texts.items():
        left_out += _write_split(folder, split, files, pair, rules, meter)
    pair.save(folder)
    manifest = {"version": VERSION, "name": name, "splits": list(texts), "left_out": left_out}
    with atomic_file(folder / MANIFEST_FILE) as file:
        file.write(json.dumps(manifest).encode())
    meter.finish()
    return Bitext.open(folder)


def one_line(text: str) -> str:
    """A sentence with single spaces: what the tokenizers see in training and in translation."""
    return " ".join(text.split())


def _cache_key(texts: dict[str, PairedFiles], rules: BitextRules, tokenization: TokenizerPair | None) -> str:
    files = {split: [file_identity(path) for path in paired.all] for split, paired in texts.items()}
    learned = [rules.vocabulary_size, rules.joint] if tokenization is None else tokenization.sha256
    settings = [learned, rules.source, rules.target, rules.max_length, rules.max_ratio]
    return hashlib.sha256(json.dumps([VERSION, files, settings]).encode()).hexdigest()


def _learn_tokenizers(files: PairedFiles, rules: BitextRules, meter: Meter) -> TokenizerPair:
    def side(index: int, share: float) -> Iterator[list[str]]:
        for block in read_pairs(files):
            yield [one_line(line) for line in (block.source, block.target)[index]]
            meter.advance(int(block.disk_bytes * share))

    if rules.joint:
        both = chain(side(0, 0.5), side(1, 0.5))
        joint = train_bpe_on(both, rules.vocabulary_size, sentences=True)
        return TokenizerPair(joint, joint)
    own = [train_bpe_on(side(index, 0.5), rules.vocabulary_size, sentences=True) for index in (0, 1)]
    return TokenizerPair(own[0], own[1])


def _write_split(
    folder: Path, split: str, files: PairedFiles, pair: TokenizerPair, rules: BitextRules, meter: Meter
) -> int:
    """Encode the pairs of a split that are kept; returns how many are left out."""
    left_out = 0
    with (
        token_file_writer(folder / f"{split}.source.tokens", pair.source, files.name) as source,
        token_file_writer(folder / f"{split}.target.tokens", pair.target, files.name) as target,
    ):
        for block in read_pairs(files):
            lines = [[one_line(line) for line in side] for side in (block.source, block.target)]
            ids = [pair.source.encode_sentences(lines[0]), pair.target.encode_sentences(lines[1])]
            lengths = np.array([[len(sentence) for sentence in side] for side in ids])  # (2, n)
            kept = _kept(lengths, rules) if split == "train" else np.ones(lengths.shape[1], dtype=bool)
            for writer, sentences, texts, eos in zip(
                (source, target), ids, lines, (pair.source.eos_id, pair.target.eos_id), strict=True
            ):
                chosen = np.flatnonzero(kept)
                flat = chain.from_iterable((*sentences[i], eos) for i in chosen)
                raw = "".join(f"{texts[i]}\n" for i in chosen).encode()
                writer.add(np.fromiter(flat, dtype=np.uint32), raw, len(chosen))
            left_out += int(np.count_nonzero(~kept))
            meter.advance(block.disk_bytes)
        if not source.tokens:
            raise UserError(
                f"No pair of {files.name} is kept: all are empty on a side, longer than {rules.max_length} tokens or "
                f"more unequal than 1 : {rules.max_ratio:g}."
            )
    return left_out


def _kept(lengths: np.ndarray, rules: BitextRules) -> np.ndarray:
    """(2, n) lengths in tokens → which of the n pairs to train on."""
    shorter, longer = lengths.min(0), lengths.max(0)
    return (shorter > 0) & (longer <= rules.max_length) & (longer <= rules.max_ratio * shorter + RATIO_SLACK)


def _open_split(folder: Path, split: str, pair: TokenizerPair) -> SentencePairs:
    files = [TokenFile.open(folder / f"{split}.{side}.tokens") for side in ("source", "target")]
    for file, tokenizer in zip(files, (pair.source, pair.target), strict=True):
        if file.header.vocabulary_sha256 != tokenizer.sha256:
            raise UserError(
                f"{file.path} was made with another tokenizer than the one beside it: delete the folder {folder} so "
                "that the text is encoded again."
            )
    if files[0].header.lines != files[1].header.lines:
        raise UserError(f"The two sides of {split} in {folder} have different numbers of sentences: delete the folder.")
    return SentencePairs(files[0], files[1], (pair.source.eos_id, pair.target.eos_id))


def _sentence_ends(file: TokenFile, eos_id: int) -> np.ndarray:
    starts: Sequence[int] = range(0, len(file), _SEARCHED_AT_ONCE)
    found = [np.flatnonzero(file.tokens[at : at + _SEARCHED_AT_ONCE] == eos_id) + at + 1 for at in starts]
    return np.concatenate(found).astype(np.int64)


def load_joint_tokenizer(path: str | Path) -> TokenizerPair:
    """A tokenizer file of the package tokenizers for both sides."""
    joint = SubwordTokenizer.load(path)
    return TokenizerPair(joint, joint)
