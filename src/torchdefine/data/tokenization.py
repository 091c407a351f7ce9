"""What words and subwords have in common: all that the rest of the library uses of text ↔ ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from torchdefine.files import write_text


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
        path = Path(path)
        file = path / self.file_name if path.is_dir() else path
        write_text(file, self._file_text())
        return file

    @abstractmethod
    def _file_text(self) -> str: ...
