"""The result of a finished run, with everything that a reader needs to trust it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdefine.recipe import Recipe
from torchdefine.run.folder import RunFolder
from torchdefine.training.evaluation import perplexity
from torchdefine.training.progress import shown_perplexity
from torchdefine.training.state import Position

CLEARLY_WORSE = 1.1
"""By this factor of a perplexity."""


def best_before_the_end(result: dict[str, Any]) -> str:
    """A sentence about weights that are not the last ones; empty where they are."""
    if "valid_perplexity" not in result or not result["curve"] or result["best_step"] == result["curve"][-1]["step"]:
        return ""
    return (
        f"The weights are those of step {result['best_step']:,}, the best on the validation text, whose perplexity was "
        f"{shown_perplexity(result['curve'][-1]['perplexity'])} by the end."
    )


def shortfall(result: Mapping[str, Any]) -> str:
    """A sentence on a run that has learned less than it should, and what to do; empty for all others."""
    valid, size = result.get("valid_perplexity"), result["data"]["vocabulary_size"]
    unigram = result.get("valid_unigram_perplexity")
    last = result["curve"][-1]["perplexity"] if result["curve"] else None
    if valid is None:
        return ""
    too_well = "it fits its training text alone: use more text, or fewer steps" if _overfitted(result) else ""
    guessing = f"worse than guessing evenly among the {size:,} tokens of the vocabulary"
    if valid > size:
        cure = f", though {too_well}" if too_well else ": try a smaller optim.lr, a schedule.warmup, or more steps"
        return f"The model is {guessing}{cure}."
    if last is None or not last <= size:
        kept = f"the weights that were kept are those of step {result['best_step']:,}"
        cure = f"; {too_well}" if too_well else ": try a smaller optim.lr or a schedule.warmup"
        return f"The model became {guessing}, and {kept}{cure}."
    if unigram is not None and valid > unigram:
        cure = f", though {too_well}" if too_well else ": train longer, or try another optim.lr"
        counting = f"a perplexity of {unigram:,.1f} on the validation text"
        return f"A model that only counts words does better, with {counting}{cure}."
    return ""


def _overfitted(result: Mapping[str, Any]) -> bool:
    """Whether validation was best clearly before the end, while training got better than that: else it diverged."""
    best, last = result["valid_perplexity"], result["curve"][-1]["perplexity"] if result["curve"] else None
    if last is None or not result.get("train_curve"):
        return False
    return last > CLEARLY_WORSE * best and perplexity(result["train_curve"][-1]["loss"]) < best


def as_read(changes: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Changes with their values as the recipe has read them: a command line gives only text."""
    settings = recipe.to_plain()
    return {
        section: values
        if isinstance(values, str)
        else {name: settings.get(section, {}).get(name, value) for name, value in values.items()}
        for section, values in changes.items()
        if values
    }


def describe_training(
    recipe: Any, changes: Mapping[str, Any], parameters: dict[str, int], folder: RunFolder, position: Position
) -> dict[str, Any]:
    """What every run has, whatever its model: settings, sizes, how long it took, and its curves."""
    return {
        "recipe": recipe.name,
        "overrides": as_read(changes, recipe),
        "settings": recipe.to_plain(),
        "seed": recipe.train.seed,
        "parameters": parameters,
        "steps": position.step,
        "tokens": position.tokens,
        "seconds": round(position.total_seconds, 2),
        "tokens_per_second": round(position.tokens / max(position.train_seconds, 1e-9), 1),
        "best_step": position.best_step,
        "curve": [{k: v for k, v in record.items() if k != "kind"} for record in folder.records("valid")],
        "train_curve": [
            {k: record[k] for k in ("step", "tokens", "seconds", "loss", "lr", "gradient_norm") if k in record}
            for record in folder.records("train")
        ],
    }
