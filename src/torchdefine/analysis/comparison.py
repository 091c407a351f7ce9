"""Runs side by side: what they have, what they reached, and whether the comparison is fair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdefine.analysis.parameters import PARTS
from torchdefine.analysis.run_summary import RunSummary, summarise
from torchdefine.analysis.tables import print_table
from torchdefine.errors import UserError

BASIC_COLUMNS = ["run", "unit", "context", "tables", "total M", "valid", "test", "bits/byte", "tokens/s", "seconds"]


@dataclass(frozen=True)
class Comparison:
    """Runs in the order given."""

    runs: list[RunSummary]

    @property
    def warnings(self) -> list[str]:
        """Why the numbers may not be comparable; empty if nothing speaks against it."""
        questions: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
            ("were trained on different texts", lambda r: r["data"]["splits"].get("train")),
            (
                "have different vocabularies, so their perplexities do not compare",
                lambda r: r["data"]["vocabulary_sha256"],
            ),
            ("were trained for different numbers of tokens", lambda r: r["tokens"]),
            (
                "were evaluated on different texts",
                lambda r: [r["data"]["splits"].get(split, {}).get("text_sha256") for split in ("valid", "test")],
            ),
            ("were evaluated by different protocols", lambda r: r["evaluation"].get("test", {}).get("protocol")),
        ]
        results = [run.result for run in self.runs if run.result is not None]
        found = [
            f"The runs {what}."
            for what, value in questions
            if any(value(result) != value(results[0]) for result in results)
        ]
        return found + [run.status for run in self.runs if run.status]

    @property
    def unigram(self) -> float | None:
        """The test perplexity of a model that only counts words."""
        return next((run.result.get("test_unigram_perplexity") for run in self.runs if run.result is not None), None)

    @property
    def note(self) -> str:
        counted = (
            f" A model that only counts words has a test perplexity of {self.unigram:,.1f}." if self.unigram else ""
        )
        return f"Unit, context model, tables and total in millions of parameters; * marks the best perplexity.{counted}"

    @property
    def translates(self) -> bool:
        return any(run.recipe.task == "translation" for run in self.runs)

    @property
    def columns(self) -> list[str]:
        return [*BASIC_COLUMNS, *(["BLEU", "chrF"] if self.translates else [])]

    def rows(self) -> list[list[str]]:
        """The cells under ``columns``; the best perplexities are marked."""
        best = {
            split: min((p for run in self.runs if (p := run.perplexity(split)) is not None), default=None)
            for split in ("valid", "test")
        }
        return [
            [
                run.name,
                *(f"{run.parameters[part] / 1e6:.3f}" if run.parameters else "–" for part in PARTS),
                *(_perplexity(run.perplexity(split), best[split]) for split in ("valid", "test")),
                _number((run.fact("evaluation") or {}).get("test", {}).get("bits_per_byte"), ".4f"),
                _number(run.fact("tokens_per_second"), ",.0f"),
                _number(run.fact("seconds"), ",.0f"),
                *([_number(run.fact(f"test_{score}"), ".2f") for score in ("bleu", "chrf")] if self.translates else []),
            ]
            for run in self.runs
        ]

    def to_dict(self) -> dict[str, Any]:
        facts = (
            "seed",
            "steps",
            "tokens",
            "seconds",
            "tokens_per_second",
            "test_unigram_perplexity",
            "test_bleu",
            "test_chrf",
            "commit",
            "hardware",
        )
        runs = [
            {
                "run": run.name,
                "recipe": run.recipe.name,
                "parameters": run.parameters,
                "valid_perplexity": run.perplexity("valid"),
                "test_perplexity": run.perplexity("test"),
                **{fact: run.fact(fact) for fact in facts},
            }
            for run in self.runs
        ]
        return {"runs": runs, "warnings": self.warnings}


def compare_runs(folders: Sequence[str | Path]) -> Comparison:
    """Compare finished runs."""
    comparison = Comparison(summarise(folders))
    for run, path in zip(comparison.runs, folders, strict=True):
        if run.result is None:
            raise UserError(f"The run in {path} is not finished: go on with `torchdefine train` and --resume.")
    return comparison


def print_comparison(comparison: Comparison) -> None:
    print_table(comparison.columns, comparison.rows(), comparison.note)
    for warning in comparison.warnings:
        print(f"Beware: {warning}")


def _perplexity(value: float | None, best: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}{'*' if value == best else ''}"


def _number(value: float | None, shape: str) -> str:
    return "–" if value is None else format(value, shape)
