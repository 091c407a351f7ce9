"""Who owns the parameters, ours beside the paper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchdefine.analysis.tables import print_table
from torchdefine.embedding import Plan
from torchdefine.recipe import Recipe
from torchdefine.task import Tokens, find_task

PARTS = ("define", "context", "input_output", "total")
PART_NAMES = {"define": "unit", "context": "context model", "input_output": "input and output tables", "total": "total"}


@dataclass(frozen=True)
class ParameterReport:
    """Parameters of a recipe's model by part, in the paper's columns."""

    recipe: str
    vocabulary_size: int
    counts: dict[str, int]
    published: dict[str, float]
    """Millions, where the paper gives them."""
    plan: Plan | None

    def to_dict(self) -> dict[str, Any]:
        """Millions by part, and the exact counts."""
        return {
            "recipe": self.recipe,
            "vocabulary_size": self.vocabulary_size,
            **{part: round(self.counts[part] / 1e6, 6) for part in PARTS},
            **{f"published_{part}": self.published.get(part) for part in PARTS},
            "counts": self.counts,
        }


def parameter_report(recipe: Recipe, tokens: Tokens | None = None) -> ParameterReport:
    """Build the model without its memory and count; the vocabulary is the recipe's, or that of a run's ``tokens``."""
    model: Any
    model, size = find_task(recipe.task).count(recipe, tokens)
    plan = getattr(list(model.embeddings().values())[-1].unit, "plan", None)
    return ParameterReport(recipe.name, size, model.parameters_by_part(), recipe.published, plan)


def print_parameters(report: ParameterReport, *, with_plan: bool = False) -> None:
    rows = [
        [
            PART_NAMES[part],
            f"{report.counts[part] / 1e6:.4f}",
            f"{report.published[part]:.2f}" if part in report.published else "–",
            f"{report.counts[part] / report.counts['total']:.1%}",
        ]
        for part in PARTS
    ]
    note = f"Millions of parameters of {report.recipe} with a vocabulary of {report.vocabulary_size:,}."
    print_table(["part", "ours", "paper", "fraction"], rows, note)
    if with_plan and report.plan is not None:
        print(f"\n{report.plan}")
