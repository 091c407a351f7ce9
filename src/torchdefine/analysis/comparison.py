"""Runs side by side: what they have, what they reached, and whether the comparison is fair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchdefine.analysis import seeds
from torchdefine.analysis.fairness import (
    what_else_differs,
    what_is_missing,
    which_texts_are_short,
    why_incomparable,
)
from torchdefine.analysis.parameters import PARTS
from torchdefine.analysis.run_summary import RunSummary, summarise
from torchdefine.analysis.seeds import same_but_for_seed
from torchdefine.analysis.tables import NOT_FINITE, print_table

PART_COLUMNS = {"define": "unit", "context": "context", "input_output": "tables", "total": "total M"}
UNIGRAM = "test_unigram_perplexity"
"""The test perplexity of a model that only counts words."""


@dataclass(frozen=True)
class Comparison:
    """Runs in the order given."""

    runs: list[RunSummary]

    @property
    def warnings(self) -> list[str]:
        """Why the numbers may not be comparable; empty if nothing speaks against it."""
        fair = [*why_incomparable(self.runs), *what_else_differs(self.runs)]
        return [*fair, *which_texts_are_short(self.runs), *what_is_missing(self.runs)]

    @cached_property
    def best(self) -> dict[str, float]:
        """The best perplexity of each split that has one: where perplexities of at least two finished runs compare."""
        if why_incomparable(self.runs) or which_texts_are_short(self.runs):
            return {}
        reached = {
            split: [p for run in self.runs if run.result is not None and (p := run.perplexity(split)) is not None]
            for split in ("valid", "test")
        }
        return {split: min(p) for split, p in reached.items() if len(p) > 1 and math.isfinite(min(p))}

    @property
    def note(self) -> str:
        marked = "; * marks the best perplexity" if self.best else ""
        counted = self._values(UNIGRAM)
        beside = (
            f" A model that only counts words has a test perplexity of {counted[0]:,.1f}." if len(counted) == 1 else ""
        )
        return f"Unit, context model, tables and total in millions of parameters{marked}.{beside}"

    @property
    def columns(self) -> list[str]:
        return list(self._cells(self.runs[0])) if self.runs else []

    def rows(self) -> list[list[str]]:
        """The cells under ``columns``; the best perplexities are marked."""
        return [list(self._cells(run).values()) for run in self.runs]

    def _cells(self, run: RunSummary) -> dict[str, str]:
        """One row by its columns; some are there only where a run has something to show in them."""
        cells = {"run": run.name if run.result is not None else f"{run.name} (unfinished)"}
        for part in PARTS:
            cells[PART_COLUMNS[part]] = f"{run.parameters[part] / 1e6:.3f}" if run.parameters else "–"
        for split in ("valid", "test"):
            cells[split] = self._perplexity(run, split)
        if len(self._values(UNIGRAM)) > 1:
            cells["unigram"] = _number(run.fact(UNIGRAM), ",.1f")
        cells["bits/byte"] = _number(run.of_test("bits_per_byte"), ".4f")
        if any(other.of_test("unknown_share") for other in self.runs):
            cells["<unk>"] = _number(run.of_test("unknown_share"), ".2%")
        cells["tokens/s"] = _number(run.fact("tokens_per_second"), ",.0f")
        cells["seconds"] = _number(run.fact("seconds"), ",.0f")
        if any(other.recipe.task == "translation" for other in self.runs):
            cells["BLEU"] = _number(run.fact("test_bleu"), ".2f")
            cells["chrF"] = _number(run.fact("test_chrf"), ".2f")
        return cells

    def _perplexity(self, run: RunSummary, split: str) -> str:
        value = run.perplexity(split)
        is_best = run.result is not None and value is not None and value == self.best.get(split)
        return f"{_number(value, ',.2f')}{'*' if is_best else ''}"

    def _values(self, fact: str) -> list[Any]:
        """The different values that a fact has in the runs that have it."""
        return list(dict.fromkeys(value for run in self.runs if (value := run.fact(fact)) is not None))

    def to_dict(self) -> dict[str, Any]:
        facts = (
            "seed",
            "steps",
            "tokens",
            "seconds",
            "tokens_per_second",
            UNIGRAM,
            "test_bleu",
            "test_chrf",
            "commit",
            "hardware",
        )
        runs = [
            {
                "run": run.name,
                "finished": run.result is not None,
                "recipe": run.recipe.name,
                "parameters": run.parameters,
                "valid_perplexity": run.perplexity("valid"),
                "test_perplexity": run.perplexity("test"),
                "test_bits_per_byte": run.of_test("bits_per_byte"),
                "test_unknown_share": run.of_test("unknown_share"),
                **{fact: run.fact(fact) for fact in facts},
            }
            for run in self.runs
        ]
        over_seeds = [group.to_dict() for group in same_but_for_seed(self.runs)]
        return {"runs": runs, "over_seeds": over_seeds, "warnings": self.warnings}


def compare_runs(folders: Sequence[str | Path]) -> Comparison:
    """Compare runs; one that is not finished is called so."""
    return Comparison(summarise(folders))


def print_comparison(comparison: Comparison) -> None:
    print_table(comparison.columns, comparison.rows(), comparison.note)
    if groups := same_but_for_seed(comparison.runs):
        print()
        print_table(seeds.COLUMNS, [group.cells() for group in groups], seeds.NOTE)
    for warning in comparison.warnings:
        print(f"Beware: {warning}")


def _number(value: float | None, shape: str) -> str:
    if value is None:
        return "–"
    return format(value, shape) if math.isfinite(value) else NOT_FINITE
