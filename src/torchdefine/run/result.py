"""What is said of a finished run from its result: whether it learned less than it should."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdefine.task import find_task
from torchdefine.training.evaluation import perplexity
from torchdefine.training.progress import shown_perplexity

CLEARLY_WORSE = 1.1
"""By this factor of a perplexity."""


def best_before_the_end(result: Mapping[str, Any]) -> str:
    """A sentence about weights that are not the last ones; empty where they are."""
    if "valid_perplexity" not in result or not result["curve"] or result["best_step"] == result["curve"][-1]["step"]:
        return ""
    return (
        f"The weights are those of step {result['best_step']:,}, which has the best validation perplexity. At the end "
        f"it was {shown_perplexity(result['curve'][-1]['perplexity'])}."
    )


def shortfall(result: Mapping[str, Any]) -> str:
    """A sentence on a run that has learned less than it should, and what to do; empty for all others."""
    valid, size = result.get("valid_perplexity"), result["data"]["vocabulary_size"]
    if valid is None:
        return ""
    unigram = result.get("valid_unigram_perplexity")
    last = result["curve"][-1]["perplexity"] if result["curve"] else None
    # Overfitted: validation was best clearly before the end, while training got better than that; else it diverged.
    worse = last is not None and last > CLEARLY_WORSE * valid
    trained = result.get("train_curve")
    too_well = ""
    if worse and trained and perplexity(trained[-1]["loss"]) < valid:
        too_well = "it overfits the training text: use more text, or fewer steps"
    guessing = f"worse than uniform guessing among the {size:,} tokens of the vocabulary"
    if valid > size:
        cure = f", though {too_well}" if too_well else ": try a smaller optim.lr, a schedule.warmup, or more steps"
        return f"The model is {guessing}{cure}."
    if last is None or not last <= size:
        kept = f"the saved weights are those of step {result['best_step']:,}"
        cure = f"; {too_well}" if too_well else ": try a smaller optim.lr or a schedule.warmup"
        return f"The model became {guessing}, and {kept}{cure}."
    if unigram is not None and valid > unigram:
        cure = f", though {too_well}" if too_well else ": train longer, or try another optim.lr"
        counting = f"a perplexity of {unigram:,.1f} on the validation text"
        return f"A model that only counts words does better, with {counting}{cure}."
    task = find_task(result.get("settings", {}).get("task"))
    for fact, least in task.least_scores.items():
        if result.get(fact, least) < least:
            score = f"{task.scores[fact]} on the test text is {result[fact]:.2f}"
            return f"The model has learned next to nothing: its {score}: train longer, or try another optim.lr."
    return ""
