"""Text ↔ ids: what words and subwords have in common, and words, the most frequent first."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np

from torchdefine.errors import UserError
from torchdefine.files import read_text, write_text

UNK = "<unk>"
EOS = "<eos>"
VOCABULARY_FILE = "vocab.txt"

_HEADER = "# torchdefine vocabulary 1"


class Tokenization(ABC):
    """Text ↔ ids: a ``Vocabulary`` or a ``SubwordTokenizer``."""

    kind: Literal["words", "subwords"]
    file_name: str
    """Of the file in a run's folder."""
    eos_id: int
    """Ends each line, and stands before the first token of a text."""
    unk_id: int
    pad_id: int | None = None
    bos_id: int | None = None
    counts: list[int] | None = None
    """How often each token stands in the training text, where that is known."""

    @abstractmethod
    def __len__(self) -> int:
        """How many ids there are: every id is smaller."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """The fingerprint: equal for two tokenizations that give equal ids."""

    @abstractmethod
    def id(self, token: str) -> int:
        """The id of a token; that of ``<unk>`` for any other piece of text."""

    @abstractmethod
    def token(self, index: int) -> str: ...

    @abstractmethod
    def encode_lines(self, lines: Sequence[str]) -> np.ndarray:
        """The ids of each line, each followed by ``eos_id``, as one array of uint32: fast for many lines."""

    @abstractmethod
    def lost_characters(self, lines: Sequence[str]) -> tuple[int, int]:
        """How many characters are told by no id, not even by that of ``<unk>``, and of how many that were looked at."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, each line ended by ``<eos>``, the last one too where its newline is missing."""
        return self.encode_lines(text.removesuffix("\n").split("\n")).tolist() if text else []

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; each ``<eos>`` becomes a newline."""
        lines: list[list[int]] = [[]]
        for index in ids:
            if index == self.eos_id:
                lines.append([])
            else:
                lines[-1].append(int(index))
        return "\n".join(map(self._decode_line, lines))

    @abstractmethod
    def _decode_line(self, ids: list[int]) -> str: ...

    def save(self, path: str | Path) -> Path:
        """Write to the file ``path``, or for ``load_tokenization`` into the folder ``path``; return the file."""
        file = Path(path) / self.file_name if Path(path).is_dir() else Path(path)
        write_text(file, self._file_text())
        return file

    @abstractmethod
    def _file_text(self) -> str: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} {self.kind})"


def split_words(lines: Iterable[str]) -> list[str]:
    """The words of each line followed by ``<eos>``, in one flat list."""
    # One join and one split for many lines: several times as fast as a loop over the lines.
    return f" {EOS} ".join([*lines, ""]).split()


class Vocabulary(Tokenization):
    """Words ↔ ids in order of frequency, ties in alphabetical order.

    ``<unk>`` stands for every word that is not in the vocabulary and ``<eos>`` ends each line; both take the
    place that their counts give them.
    """

    kind = "words"
    file_name = VOCABULARY_FILE
    counts: list[int]

    def __init__(self, tokens: Sequence[str], counts: Sequence[int]) -> None:
        """Take tokens in the order of their ids; ``from_counts`` finds that order."""
        if len(tokens) != len(counts):
            raise UserError(f"A vocabulary needs a count for each token, not {len(counts)} for {len(tokens)} tokens.")
        self.tokens, self.counts = list(tokens), list(counts)
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        for index, token in enumerate(self.tokens):
            if self._ids[token] != index:
                raise UserError(f"The token {token!r} stands in the vocabulary twice.")
            if token.split() != [token]:
                raise UserError(f"The token {token!r} is empty or has white space in it, so no text can contain it.")
        for special in (UNK, EOS):
            if special not in self._ids:
                raise UserError(f"A vocabulary needs {special} among its tokens.")
        self.unk_id, self.eos_id = self._ids[UNK], self._ids[EOS]

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], min_count: int = 1, max_size: int | None = None) -> Vocabulary:
        """Keep words seen ``min_count`` times, at most ``max_size`` tokens in all; ``<unk>`` gets the other counts."""
        words = [(word, count) for word, count in counts.items() if word not in (UNK, EOS)]
        kept = sorted((item for item in words if item[1] >= min_count), key=_by_frequency)
        if max_size is not None:
            kept = kept[: max_size - 2]
        dropped = sum(count for _, count in words) - sum(count for _, count in kept)
        kept += [(UNK, counts.get(UNK, 0) + dropped), (EOS, counts.get(EOS, 0))]
        kept.sort(key=_by_frequency)
        return cls([word for word, _ in kept], [count for _, count in kept])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\n".join(self.tokens).encode()).hexdigest()

    def id(self, token: str) -> int:
        return self._ids.get(token, self.unk_id)

    def token(self, index: int) -> str:
        if not 0 <= index < len(self.tokens):
            raise IndexError(f"The id {index} is outside the vocabulary of {len(self.tokens)} words.")
        return self.tokens[index]

    def encode_lines(self, lines: Sequence[str]) -> np.ndarray:
        words = split_words(lines)
        return np.fromiter(map(self._ids.get, words, repeat(self.unk_id)), dtype=np.uint32, count=len(words))

    def lost_characters(self, lines: Sequence[str]) -> tuple[int, int]:
        """None of all: a word that is unknown is ``<unk>``, and white space is not counted."""
        return 0, sum(map(len, lines))

    def _decode_line(self, ids: list[int]) -> str:
        return " ".join(map(self.token, ids))

    def _file_text(self) -> str:
        rows = (f"{token}\t{count}\n" for token, count in zip(self.tokens, self.counts, strict=True))
        return f"{_HEADER}\t{len(self)}\n" + "".join(rows)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what ``save`` wrote: a header with the number of tokens, then ``token<TAB>count`` a line."""
        header, _, body = read_text(Path(path), "vocabulary file").removesuffix("\n").partition("\n")
        name, _, announced = header[:100].partition("\t")
        if name != _HEADER:
            raise UserError(f"{path} is not a vocabulary file of a known version: it must begin with '{_HEADER}'.")
        try:
            if announced != str(found := body.count("\n") + bool(body)):
                raise UserError(f"its header announces {announced or 'no'} tokens, but it has {found}.")
            pairs = [row.rpartition("\t")[::2] for row in body.split("\n")] if body else []
            for number, (_, count) in enumerate(pairs, start=2):
                if not (count.isdecimal() and len(count) < 19):
                    raise UserError(f"line {number} is not a token, a tab and a count.")
            return cls([token for token, _ in pairs], [int(count) for _, count in pairs])
        except UserError as error:
            raise UserError(f"{path} is damaged, so copy it again from where it was made: {error}") from error


def _by_frequency(item: tuple[str, int]) -> tuple[int, str]:
    word, count = item
    return -count, word
