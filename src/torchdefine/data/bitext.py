"""A bitext: the pairs of each split as memory-mapped token files, and the tokenizers they were made with.

It is encoded once, into a folder of the cache, as a corpus is. train.source.tokens and train.target.tokens have the
sentences in the same order, each ended by <eos>, which stands nowhere else and so marks where each begins and ends.
Training pairs that are empty on a side, too long or too unequal are left out; valid and test are kept whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from torchdefine.config import setting
from torchdefine.data.sources import DataConfig, PairedFiles, find_bitext
from torchdefine.data.text_files import bytes_of, read_pairs
from torchdefine.data.token_file import (
    Headers,
    TokenFile,
    TokenWriter,
    encoded_once,
    only,
    open_encoded,
    write_manifest,
)
from torchdefine.data.tokenizer import SMALLEST_BPE, TokenizerPair, train_subwords_on
from torchdefine.errors import UserError
from torchdefine.files import Meter, Progress, atomic_file, cache_folder, check_path

MANIFEST_FILE = "bitext.json"
RATIO_SLACK = 5
"""Sentences may differ in length by this many tokens, whatever their ratio."""


@dataclass(frozen=True)
class BitextConfig(DataConfig):
    """The pairs of sentences that a translator learns from."""

    source: str = setting("en", "Source language: the ending of its files' names.")
    target: str = setting("de", "Target language: the ending of its files' names.")
    bpe_size: int = setting(8000, "Number of subwords that a BPE learns from the text.", at_least=SMALLEST_BPE)
    joint: bool = setting(True, "Whether both languages share one BPE; otherwise each has its own.")
    max_length: int = setting(100, "Training pairs with more tokens than this on a side are left out.", at_least=1)
    max_ratio: float = setting(
        3.0,
        "Training pairs are left out if one side has more than this many times the tokens of the other, plus 5.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        differ = self.source.lower() != self.target.lower()  # as names of files are read
        self.require(differ, f"source and data.target are both {self.source!r}: name two languages.")


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
        return self.source.ends(self.eos_ids[0])

    @cached_property
    def target_ends(self) -> np.ndarray:
        return self.target.ends(self.eos_ids[1])

    @property
    def tokens_sha256(self) -> str:
        """Equal for the same pairs in the same order."""
        return _joint_hash(self.source.header.tokens_sha256, self.target.header.tokens_sha256)

    @property
    def text_sha256(self) -> str:
        return _joint_hash(self.source.header.text_sha256, self.target.header.text_sha256)

    def facts(self) -> dict[str, Any]:
        """What the result of a run says of them."""
        hashes = {"text_sha256": self.text_sha256, "tokens_sha256": self.tokens_sha256}
        return {"pairs": len(self), "tokens": len(self.target), **hashes}

    def verify(self) -> None:
        """Read all the data and compare its hashes to the headers'."""
        self.source.verify()
        self.target.verify()


def _joint_hash(source: str, target: str) -> str:
    return hashlib.sha256((source + target).encode()).hexdigest()


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
        facts, pair, files = open_encoded(folder / MANIFEST_FILE, TokenizerPair.load)
        eos_ids = (pair.source.eos_id, pair.target.eos_id)
        splits = {split: SentencePairs(source, target, eos_ids) for split, (source, target) in files.items()}
        return cls(facts["name"], folder, pair, splits, facts["left_out"])


def encode_bitext(
    source: str | Path,
    rules: BitextConfig,
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
    if split is not None and tokenization is None:
        raise UserError("One split alone is encoded with tokenizers that exist already: give them.")
    path = check_path(source)
    texts = only(split, find_bitext(path, rules.source, rules.target, require_train=tokenization is None), path)
    name, files = path.resolve().name, {split: paired.all for split, paired in texts.items()}

    def encode(folder: Path) -> None:
        meter = Meter(bytes_of(chain(*files.values(), () if tokenization else files["train"])), progress)
        pair = tokenization or _learn_tokenizers(texts["train"], rules, meter)
        headers, left_out = {}, 0
        for split, paired in texts.items():
            headers[split], left = _write_split(folder, split, paired, pair, rules, meter)
            left_out += left
        pair.save(folder)
        write_manifest(folder / MANIFEST_FILE, name, pair.sha256, headers, left_out=left_out)
        meter.finish()

    learned = [rules.bpe_size, rules.joint] if tokenization is None else tokenization.sha256
    settings = [learned, rules.source, rules.target, rules.max_length, rules.max_ratio]
    return encoded_once(cache_folder(cache) / "bitexts" / name, files, settings, Bitext.open, encode)


def one_line(text: str) -> str:
    """A sentence with single spaces: what the tokenizers see in training and in translation."""
    return " ".join(text.split())


def _learn_tokenizers(files: PairedFiles, rules: BitextConfig, meter: Meter) -> TokenizerPair:
    def lines_of(side: int) -> Iterator[list[str]]:
        for block in read_pairs(files, lambda amount: meter.advance(amount // 2)):
            yield [one_line(line) for line in block[side]]

    if rules.joint:
        joint = train_subwords_on(chain(lines_of(0), lines_of(1)), rules.bpe_size, sentences=True)
        return TokenizerPair(joint, joint)
    own = [train_subwords_on(lines_of(side), rules.bpe_size, sentences=True) for side in (0, 1)]
    return TokenizerPair(own[0], own[1])


def _write_split(
    folder: Path, split: str, files: PairedFiles, pair: TokenizerPair, rules: BitextConfig, meter: Meter
) -> tuple[Headers, int]:
    """Encode the pairs of a split that are kept; also returns how many are left out."""
    names, tokenizers, left_out = (f"{split}.source.tokens", f"{split}.target.tokens"), (pair.source, pair.target), 0
    with atomic_file(folder / names[0]) as source, atomic_file(folder / names[1]) as target:
        writers = [TokenWriter(source, pair.source), TokenWriter(target, pair.target)]
        for block in read_pairs(files, meter.advance):
            texts = [[one_line(line) for line in side] for side in block]
            ids = [tokenizer.encode_sentences(side) for tokenizer, side in zip(tokenizers, texts, strict=True)]
            lengths = np.array([[len(sentence) for sentence in side] for side in ids])  # (2, n)
            kept = np.flatnonzero(_kept(lengths, rules)) if split == "train" else np.arange(lengths.shape[1])
            left_out += lengths.shape[1] - len(kept)
            for side, writer in enumerate(writers):
                flat = chain.from_iterable((*ids[side][index], tokenizers[side].eos_id) for index in kept)
                raw = "".join(f"{texts[side][index]}\n" for index in kept).encode()
                writer.add(np.fromiter(flat, dtype=np.uint32), raw, len(kept))
        if not writers[0].sums["lines"]:
            raise UserError(
                f"No pair of {files.name} is kept: all are empty on a side, longer than {rules.max_length} tokens or "
                f"more unequal than 1 : {rules.max_ratio:g}."
            )
        return {name: writer.header(files.name) for name, writer in zip(names, writers, strict=True)}, left_out


def _kept(lengths: np.ndarray, rules: BitextConfig) -> np.ndarray:
    """(2, n) lengths in tokens → which of the n pairs to train on."""
    shorter, longer = lengths.min(0), lengths.max(0)
    return (shorter > 0) & (longer <= rules.max_length) & (longer <= rules.max_ratio * shorter + RATIO_SLACK)
