"""What words and subwords have in common: all that the rest of the library uses of text ↔ ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from torchdefine.data.tokenizer import TOKENIZER_FILE, SubwordTokenizer
from torchdefine.data.vocabulary import VOCABULARY_FILE, Vocabulary
from torchdefine.errors import UserError

SOURCE_FILE, TARGET_FILE = "source.tokenizer.json", "target.tokenizer.json"


class Tokenization(Protocol):
    """Text ↔ ids: a ``Vocabulary`` or a ``SubwordTokenizer``."""

    @property
    def kind(self) -> Literal["words", "subwords"]: ...

    def __len__(self) -> int:
        """How many ids there are: every id is smaller."""

    @property
    def eos_id(self) -> int:
        """Ends each line, and stands before the first token of a text."""

    @property
    def unk_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int | None: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def counts(self) -> list[int] | None:
        """How often each token stands in the training text, where that is known."""

    @property
    def sha256(self) -> str:
        """Equal for two tokenizations that give equal ids."""

    def id(self, token: str) -> int: ...

    def token(self, index: int) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_lines(self, lines: Sequence[str]) -> np.ndarray:
        """The fast way for many lines: the ids of each, each ended by ``eos_id``, as one array of uint32."""

    def lost_characters(self, lines: Sequence[str]) -> tuple[int, int]:
        """How many characters are told by no id, not even by that of ``<unk>``, and of how many that were looked at."""

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, path: str | Path) -> Path:
        """Write ``vocab.txt`` or ``tokenizer.json`` into the folder ``path``, for ``load_tokenization``."""


def load_tokenization(folder: str | Path) -> Tokenization:
    """Read back what ``save`` wrote into a folder."""
    words, subwords = Path(folder) / VOCABULARY_FILE, Path(folder) / TOKENIZER_FILE
    if words.is_file() and subwords.is_file():
        raise UserError(f"{folder} has both {words.name} and {subwords.name}: remove the one that is not meant.")
    if words.is_file():
        return Vocabulary.load(words)
    if subwords.is_file():
        return SubwordTokenizer.load(subwords)
    raise UserError(f"{folder} has neither {words.name} nor {subwords.name}: check the folder's name.")


@dataclass(frozen=True)
class TokenizerPair:
    """Source and target subwords of a translator; a joint tokenizer is both."""

    source: SubwordTokenizer
    target: SubwordTokenizer
    kind: Literal["subwords"] = "subwords"

    @property
    def joint(self) -> bool:
        return self.source is self.target

    def __len__(self) -> int:
        """How many target ids there are, among which the model predicts."""
        return len(self.target)

    @property
    def sha256(self) -> str:
        both = self.source.sha256 + self.target.sha256
        return self.target.sha256 if self.joint else hashlib.sha256(both.encode()).hexdigest()

    def save(self, folder: str | Path) -> Path:
        """Write into a folder: ``tokenizer.json`` for a joint tokenizer, else one file for each side."""
        folder = Path(folder)
        if self.joint:
            self.target.save(folder / TOKENIZER_FILE)
        else:
            self.source.save(folder / SOURCE_FILE)
            self.target.save(folder / TARGET_FILE)
        return folder

    @classmethod
    def load(cls, path: str | Path) -> TokenizerPair:
        """Read what ``save`` wrote into a folder, or one tokenizer file for both sides."""
        path = Path(path)
        if not path.is_dir():
            joint = SubwordTokenizer.load(path)
            return cls(joint, joint)
        if (path / SOURCE_FILE).is_file():
            return cls(SubwordTokenizer.load(path / SOURCE_FILE), SubwordTokenizer.load(path / TARGET_FILE))
        return cls.load(path / TOKENIZER_FILE)
