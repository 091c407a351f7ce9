"""The two tokenizers of a translator, or the one that both languages share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchdefine.data.tokenizer import TOKENIZER_FILE, SubwordTokenizer
from torchdefine.errors import UserError

SOURCE_FILE, TARGET_FILE = "source.tokenizer.json", "target.tokenizer.json"


@dataclass(frozen=True)
class TokenizerPair:
    """Source and target subwords; a joint tokenizer is both."""

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
    def load(cls, folder: str | Path) -> TokenizerPair:
        """Read what ``save`` wrote."""
        folder = Path(folder)
        if (folder / TOKENIZER_FILE).is_file():
            joint = SubwordTokenizer.load(folder / TOKENIZER_FILE)
            return cls(joint, joint)
        if not (folder / SOURCE_FILE).is_file():
            raise UserError(f"{folder} has neither {TOKENIZER_FILE} nor {SOURCE_FILE}: check the folder's name.")
        return cls(SubwordTokenizer.load(folder / SOURCE_FILE), SubwordTokenizer.load(folder / TARGET_FILE))
