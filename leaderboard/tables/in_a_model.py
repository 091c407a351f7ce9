"""The token table of a model of transformers: what is known of it, and the model with another one in its place."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leaderboard.board import Table
from leaderboard.measuring import once
from torchdefine.adapt import Behaviour, Distillation
from torchdefine.adapt.distill import has_bfloat16
from torchdefine.adapt.purposes import Purpose
from torchdefine.adapt.sentences import token_counts
from torchdefine.data import read_text
from torchdefine.tables.source import Source
from torchdefine.training.progress import work_bar

MEASURED, FELT, TAUGHT, COUNTED = 1_000, 1_200, 6_400, 300_000
"""Sentences, in this order: measured on and used for nothing else; for the sensitivity; to distil; counted."""


class InAModel(Table):
    def __init__(self, title: str, model: Any, tokenizer: Any, purpose: Purpose, text: Path) -> None:
        self.model, self.tokenizer, self.purpose = model, tokenizer, purpose
        sentences = by_hash(text)
        self.sentences, self._rest = sentences[:MEASURED], sentences[MEASURED:]
        matrix = model.get_input_embeddings().weight.detach()
        self.learning = Distillation(bfloat16=has_bfloat16(torch.device("cpu")))
        self.facts = {
            "title": title,
            "shape": list(matrix.shape),
            "text": {
                "name": text.resolve().name,
                "sha256": hashlib.sha256("\n".join(sentences).encode()).hexdigest(),
                "sentences": len(sentences),
                "measured_on": len(self.sentences),
                "sensitivity_from": len(self._rest[:FELT]),
                "distilled_on": len(self._rest[FELT : FELT + TAUGHT]),
                "counted": len(self._rest[:COUNTED]),
            },
        }

    def prepare(self) -> dict[str, Tensor]:
        """What all rows need, computed once; sets source and teacher."""
        prepared = once(self.facts, self.found_out)
        matrix = self.model.get_input_embeddings().weight.detach()
        self.source = Source(matrix, prepared["counts"], prepared["sensitivity"])
        self.teacher = self._behaviour(self._rest[FELT : FELT + TAUGHT])
        return prepared

    def found_out(self) -> dict[str, Tensor]:
        felt = self._behaviour(sorted(self._rest[:FELT], key=len))
        with work_bar("sensitivity") as report:
            sensitivity = felt.sensitivity(progress=report)
        rows = self.model.get_input_embeddings().num_embeddings
        return {"counts": token_counts(self.tokenizer, self._rest[:COUNTED], rows), "sensitivity": sensitivity}

    def _behaviour(self, sentences: Sequence[str]) -> Behaviour:
        batches = self.purpose.batches(self.model, self.tokenizer, sentences)
        table = self.model.get_input_embeddings()
        target = next(name for name, module in self.model.named_modules() if module is table)
        return Behaviour(self.model, target, self.purpose.encode, batches, agreement=self.purpose.agreement)


def with_matrix(model: Any, matrix: Tensor) -> Any:
    """The model with another matrix in the place of its own, and of a tied head's; other parameters are shared."""
    made = copy.deepcopy(model, {id(one): one for one in model.parameters()})
    head, table = made.get_output_embeddings(), nn.Embedding.from_pretrained(matrix)
    if head is not None and head.weight is made.get_input_embeddings().weight:
        head.weight = table.weight
    made.set_input_embeddings(table)
    return made


def by_hash(path: Path) -> list[str]:
    """The file's different lines, in an order that depends on nothing but themselves."""
    lines = {line for block in read_text(path) for line in block.lines if line.strip()}
    return sorted(lines, key=lambda line: hashlib.sha256(line.encode()).digest())
