"""A language model in a folder of transformers; its output layer may be tied to the table."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from leaderboard.board import Packed
from leaderboard.tables.in_a_model import InAModel, with_matrix
from torchdefine.adapt.measures import Measure
from torchdefine.adapt.purposes import Predictions
from torchdefine.training.progress import work_bar

BITS = (4, 3, 2, 1)
"""The budgets, for each number of the table."""


class LanguageModel(InAModel):
    may_lose_rows = False  # predictions over two vocabularies do not compare

    def __init__(self, folder: Path, sentences: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        title = f"A language model, {type(model).__name__}"
        super().__init__(title, model, tokenizer, Predictions(masks=False), sentences)
        weights = (folder / "model.safetensors").read_bytes()
        self.facts |= {"weights_sha256": hashlib.sha256(weights).hexdigest()}
        self.prepare()
        self.sizes = tuple(self.source.matrix.numel() * bits // 8 for bits in BITS)

    def judge(self, packed: Packed) -> tuple[dict[str, Measure], dict[str, Any]]:
        after = with_matrix(self.model, packed.matrix)
        with work_bar("reading") as report:
            both = (self.model, self.tokenizer), (after, self.tokenizer)
            return self.purpose.compare(*both, self.sentences, report), {}


def opened(folder: Path, sentences: Path) -> LanguageModel:
    return LanguageModel(folder, sentences)
