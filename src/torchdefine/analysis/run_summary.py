"""What a run folder tells without training any further: finished, still training, or broken off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdefine.errors import UserError
from torchdefine.run import Run, RunFolder, load_run


@dataclass(frozen=True)
class RunSummary:
    """One run: its recipe, its log, and its result where there is one."""

    name: str
    folder: RunFolder
    recipe: Any
    result: dict[str, Any] | None
    start: dict[str, Any]
    """The head of the log: parameters, commit, versions, hardware. Empty if the run never got that far."""
    valid: list[dict[str, Any]]
    train: list[dict[str, Any]]

    @property
    def status(self) -> str:
        """Why the run has no result, in one sentence; empty for a finished one."""
        if self.result is not None:
            return ""
        if not self.train and not self.valid:
            return f"{self.name} has logged nothing yet: it has just started, or stopped at once."
        step = max(record["step"] for record in (*self.train, *self.valid))
        minutes = (time.time() - self.folder.journal.stat().st_mtime) / 60
        return f"{self.name} is not finished: its log ends at step {step:,}, {minutes:,.0f} minutes ago."

    @property
    def parameters(self) -> dict[str, int] | None:
        """Parameters by part."""
        return (self.result or self.start).get("parameters")

    def perplexity(self, split: str) -> float | None:
        """From the result, or for validation the best so far."""
        if self.result is not None:
            return self.result.get(f"{split}_perplexity")
        return min((r["perplexity"] for r in self.valid), default=None) if split == "valid" else None

    def fact(self, name: str) -> Any:
        """Something of the result or else of the log: commit, versions, hardware, tokens, seconds …"""
        if self.result is not None:
            return self.result.get(name)
        last = max((*self.train, *self.valid), key=lambda r: r["step"], default={})
        return self.start.get(name, last.get(name))

    def evaluation(self, split: str) -> dict[str, Any]:
        """What was measured on a text; empty where there is none."""
        return (self.fact("evaluation") or {}).get(split, {})

    def open(self) -> Run | None:
        """The run with its best weights, or its last ones; None if it has written none that can be read."""
        for checkpoint in ("best", "last"):
            try:
                return load_run(self.folder.path, checkpoint=checkpoint, device="cpu")
            except UserError:
                continue
        return None


def instead_of_the_best(run: Run) -> str:
    """A sentence on a run that was opened with its last weights though it has better ones; empty for all others."""
    if run.weights == run.folder.best or not run.folder.best.exists():
        return ""
    return f"The best weights of {run.folder.path} cannot be read, so the report shows the last ones: restore the file."


def summarise(paths: Sequence[str | Path]) -> list[RunSummary]:
    """Summaries in the order given, named by the last part of each path where that tells them apart."""
    given = [Path(path) for path in paths]
    last = [path.resolve().name if path.name in ("", "..") else path.name for path in given]
    names = last if len(set(last)) == len(last) else list(map(str, paths))
    summaries = []
    for name, path in zip(names, given, strict=True):
        folder = RunFolder(path)
        recipe, result = folder.recipe(), folder.read_result() if folder.result.exists() else None
        start, valid, train = (folder.records(kind) for kind in ("start", "valid", "train"))
        summaries.append(RunSummary(name, folder, recipe, result, start[-1] if start else {}, valid, train))
    return summaries
