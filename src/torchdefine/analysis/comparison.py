"""Runs side by side: what they have, what they reached, and whether the comparison is fair."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from torchdefine.analysis import fairness
from torchdefine.analysis.fairness import SPLITS
from torchdefine.analysis.run_summary import RunSummary, summarise
from torchdefine.analysis.tables import NOT_FINITE, print_table
from torchdefine.task import find_task

PART_COLUMNS = {"define": "unit", "context": "context", "input_output": "tables", "total": "total M"}
UNIGRAM = "test_unigram_perplexity"
"""The test perplexity of a model that only counts words."""
FACTS = ("seed", "steps", "tokens", "seconds", "tokens_per_second", UNIGRAM, "commit", "hardware")
"""What a program may want to know of a run, with the scores of its task."""
SEED_COLUMNS = ("runs", "seeds", "valid", "range", "test", "range")
SEED_NOTE = "Means over seeds. The range is the highest minus the lowest. A difference below it may be seed noise."


@dataclass(frozen=True)
class Comparison:
    """Runs in the order given."""

    runs: list[RunSummary]

    @property
    def warnings(self) -> list[str]:
        """Why the numbers may not be comparable; empty if nothing speaks against it."""
        fair = [*fairness.why_incomparable(self.runs), *fairness.what_else_differs(self.runs)]
        return [*fair, *fairness.which_texts_are_short(self.runs), *fairness.what_is_missing(self.runs)]

    @cached_property
    def best(self) -> dict[str, float]:
        """The best perplexity of each split that has one: where perplexities of at least two finished runs compare."""
        if fairness.why_incomparable(self.runs) or fairness.which_texts_are_short(self.runs):
            return {}
        finished = [run for run in self.runs if run.result is not None]
        reached = {split: [p for run in finished if (p := run.perplexity(split)) is not None] for split in SPLITS}
        return {split: min(p) for split, p in reached.items() if len(p) > 1 and math.isfinite(min(p))}

    @property
    def note(self) -> str:
        marked = "; * marks the best perplexity" if self.best else ""
        counted = self._values(UNIGRAM)
        beside = (
            f" A model that only counts words has a test perplexity of {counted[0]:,.1f}." if len(counted) == 1 else ""
        )
        return f"Unit, context model, tables and total: millions of parameters{marked}.{beside}"

    @property
    def scores(self) -> dict[str, str]:
        """What the tasks of the runs measure beside perplexities, with its name."""
        return {fact: name for run in self.runs for fact, name in find_task(run.recipe.task).scores.items()}

    @property
    def columns(self) -> list[str]:
        return list(self._cells(self.runs[0])) if self.runs else []

    def rows(self) -> list[list[str]]:
        """The cells under ``columns``; the best perplexities are marked."""
        return [list(self._cells(run).values()) for run in self.runs]

    def _cells(self, run: RunSummary) -> dict[str, str]:
        """One row by its columns; some are there only where a run has something to show in them."""
        test = run.evaluation("test")
        cells = {"run": run.name if run.result is not None else f"{run.name} (unfinished)"}
        for part, column in PART_COLUMNS.items():
            cells[column] = f"{run.parameters[part] / 1e6:.3f}" if run.parameters else "–"
        for split in SPLITS:
            value = run.perplexity(split)
            is_best = run.result is not None and value is not None and value == self.best.get(split)
            cells[split] = f"{_number(value, ',.2f')}{'*' if is_best else ''}"
        if len(self._values(UNIGRAM)) > 1:
            cells["unigram"] = _number(run.fact(UNIGRAM), ",.1f")
        cells["bits/byte"] = _number(test.get("bits_per_byte"), ".4f")
        if any(other.evaluation("test").get("unknown_share") for other in self.runs):
            cells["<unk>"] = _number(test.get("unknown_share"), ".2%")
        cells["tokens/s"] = _number(run.fact("tokens_per_second"), ",.0f")
        cells["seconds"] = _number(run.fact("seconds"), ",.0f")
        for fact, name in self.scores.items():
            if self._values(fact):
                cells[name] = _number(run.fact(fact), ".2f")
        return cells

    def _values(self, fact: str) -> list[Any]:
        """The different values that a fact has in the runs that have it."""
        return list(dict.fromkeys(value for run in self.runs if (value := run.fact(fact)) is not None))

    def to_dict(self) -> dict[str, Any]:
        runs = [
            {
                "run": run.name,
                "finished": run.result is not None,
                "recipe": run.recipe.name,
                "parameters": run.parameters,
                "valid_perplexity": run.perplexity("valid"),
                "test_perplexity": run.perplexity("test"),
                "test_bits_per_byte": run.evaluation("test").get("bits_per_byte"),
                "test_unknown_share": run.evaluation("test").get("unknown_share"),
                **{fact: run.fact(fact) for fact in (*FACTS, *self.scores)},
            }
            for run in self.runs
        ]
        return {"runs": runs, "over_seeds": over_seeds(self.runs), "warnings": self.warnings}


def compare_runs(folders: Sequence[str | Path]) -> Comparison:
    """Compare runs; one that is not finished is called so."""
    return Comparison(summarise(folders))


def print_comparison(comparison: Comparison) -> None:
    print_table(comparison.columns, comparison.rows(), comparison.note)
    if groups := over_seeds(comparison.runs):
        rows = []
        for group in groups:
            row = [", ".join(group["runs"]), str(len(group["runs"]))]
            for split in SPLITS:
                found = group[f"{split}_perplexity"]
                row += [f"{found['mean']:,.2f}", f"{found['range']:,.2f}"] if found else ["–", "–"]
            rows.append(row)
        print()
        print_table(SEED_COLUMNS, rows, SEED_NOTE)
    for warning in comparison.warnings:
        print(f"Warning: {warning}")


def _number(value: float | None, shape: str) -> str:
    if value is None:
        return "–"
    return format(value, shape) if math.isfinite(value) else NOT_FINITE


def over_seeds(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Means and ranges over finished runs of one recipe that differ in their seeds, in the order of the first ones.

    A seed that ran twice counts once; where a perplexity is missing or not finite, there is no mean.
    """
    by_settings: dict[str, dict[int, RunSummary]] = {}
    for run in runs:
        if run.result is not None:
            settings, data = run.recipe.to_plain(), run.result["data"]
            seed = settings["train"].pop("seed")
            # A folder may have held another text when another run read it.
            texts = {name: text.get("text_sha256") for name, text in data["splits"].items()}
            key = json.dumps([settings, data.get("vocabulary_sha256"), texts], sort_keys=True, default=str)
            by_settings.setdefault(key, {}).setdefault(seed, run)
    found = []
    for group in (list(seeds.values()) for seeds in by_settings.values() if len(seeds) > 1):
        facts: dict[str, Any] = {"runs": [run.name for run in group]}
        for split in SPLITS:
            values = [value for run in group if (value := run.perplexity(split)) is not None and math.isfinite(value)]
            whole = len(values) == len(group)
            facts[f"{split}_perplexity"] = {"mean": mean(values), "range": max(values) - min(values)} if whole else None
        found.append(facts)
    return found
