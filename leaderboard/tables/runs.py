"""The table of a run of torchdefine, judged by the perplexity of its test text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from leaderboard.board import Packed, Table
from torchdefine import load_run
from torchdefine.adapt.measures import Measure
from torchdefine.files import read_json
from torchdefine.run import Run
from torchdefine.tables import dense_table
from torchdefine.tables.source import Source

PARTS = (8, 16, 32)
"""The budgets: so many times less than the table in float32."""


class OfARun(Table):
    may_lose_rows = False  # its words would be gone from the output layer too

    def __init__(self, title: str, run: Run) -> None:
        self.run = run
        matrix = run.embedding.table()
        self.source = Source(matrix, torch.tensor(run.token_counts()))
        self.before = run.result["test_perplexity"]
        self.sizes = tuple(4 * matrix.numel() // part for part in PARTS)
        recipe = {"recipe": run.result["recipe"], "trained_at": run.result["commit"]}
        self.facts = {"title": title, "shape": list(matrix.shape), **recipe, "test_perplexity": self.before}

    def judge(self, packed: Packed) -> tuple[dict[str, Measure], dict[str, Any]]:
        """The text is read once from its beginning, so there is no interval."""
        self.run.embedding.look_up(dense_table(packed.matrix, "float32"))
        value = self.run.measure("test").facts["perplexity"]
        self.run.embedding.look_up(None)
        return {"test perplexity": Measure(value, value, value, self.before)}, {}


def of_run(title: str, folder: Path) -> OfARun:
    return OfARun(title, load_run(folder, device="cpu"))


def demo(folder: Path) -> OfARun:
    """The model that the demo packs: the one that is best on the validation text."""
    packed = read_json(folder / "demo.json")["rows"][-1]["packed_from"]
    return of_run(f"The demo's best model, {packed}", folder / packed)
