"""Runs that differ in nothing but their seed: how far apart chance alone puts them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from torchdefine.analysis.run_summary import RunSummary
from torchdefine.recipe.settings import to_plain

COLUMNS = ("runs", "seeds", "valid", "spread", "test", "spread")
NOTE = "Means over seeds. Spread is the highest less the lowest: models that differ by less may be equally good."


@dataclass(frozen=True)
class SeedGroup:
    """Finished runs of one recipe, each with a seed of its own."""

    runs: tuple[RunSummary, ...]

    @property
    def names(self) -> list[str]:
        return [run.name for run in self.runs]

    def perplexities(self, split: str) -> list[float]:
        """Of all seeds; empty where one of them has none that is a number."""
        known = [value for run in self.runs if (value := run.perplexity(split)) is not None and math.isfinite(value)]
        return known if len(known) == len(self.runs) else []

    def cells(self) -> list[str]:
        """A row under ``COLUMNS``."""
        measured: list[str] = []
        for split in ("valid", "test"):
            values = self.perplexities(split)
            shown = (f"{mean(values):,.2f}", f"{max(values) - min(values):,.2f}") if values else ("–", "–")
            measured += shown
        return [", ".join(self.names), str(len(self.runs)), *measured]

    def to_dict(self) -> dict[str, Any]:
        return {"runs": self.names} | {
            f"{split}_perplexity": {"mean": mean(values), "spread": max(values) - min(values)} if values else None
            for split in ("valid", "test")
            for values in [self.perplexities(split)]
        }


def same_but_for_seed(runs: Sequence[RunSummary]) -> list[SeedGroup]:
    """Groups of at least two runs, in the order of their first ones; a seed that ran twice counts once."""
    by_settings: dict[str, dict[int, RunSummary]] = {}
    for run in runs:
        if run.result is not None:
            settings = to_plain(run.recipe)
            seed = settings["train"].pop("seed")
            key = json.dumps([settings, _texts(run.result["data"])], sort_keys=True, default=str)
            by_settings.setdefault(key, {}).setdefault(seed, run)
    return [SeedGroup(tuple(seeds.values())) for seeds in by_settings.values() if len(seeds) > 1]


def _texts(data: Mapping[str, Any]) -> list[Any]:
    """The hashes of vocabulary and texts: a folder may have held another text when another run read it."""
    return [data.get("vocabulary_sha256"), {name: text.get("text_sha256") for name, text in data["splits"].items()}]
