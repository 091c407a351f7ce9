"""A run is a folder: settings, vocabulary, log, checkpoints, result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchdefine.data import TokenFile, Tokenization
from torchdefine.errors import UserError
from torchdefine.files import read_json, write_failure, write_json, write_text
from torchdefine.recipe import Recipe, load_recipe

RESULT_VERSION = 1


class RunFolder:
    """The files of a run, and where each of them is."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.journal = self.path / "log.jsonl"
        self.result = self.path / "result.json"
        self.last = self.path / "last" / "checkpoint.safetensors"
        self.best = self.path / "best" / "checkpoint.safetensors"
        self.fingerprints: dict[str, Any] = {}
        """Hashes that every checkpoint carries, so that it is never used with another vocabulary or text."""

    def exists(self) -> bool:
        return self.config.exists()

    def create(self, recipe: Recipe, tokenization: Tokenization) -> None:
        """Start a new run here; a folder that holds one already is left alone."""
        if self.exists():
            raise UserError(f"{self.path} holds a run already: go on with --resume, or choose another --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        tokenization.save(self.path)
        write_text(self.config, recipe.to_yaml())

    def recipe(self) -> Recipe:
        if not self.exists():
            raise UserError(f"{self.path} holds no run: config.yaml is missing.")
        return load_recipe(str(self.config))

    def fingerprint(self, tokenization: Tokenization, training_text: TokenFile | None = None) -> None:
        """Say what vocabulary, and in training what text, goes with this run."""
        self.fingerprints = {"vocabulary_sha256": tokenization.sha256, "vocabulary_size": len(tokenization)}
        if training_text is not None:
            self.fingerprints["train_tokens_sha256"] = training_text.header.tokens_sha256

    def check_fingerprints(self, facts: dict[str, Any], path: Path) -> None:
        """Refuse a checkpoint that was written with another vocabulary, or to go on training on another text."""
        if facts.get("vocabulary_sha256") != self.fingerprints["vocabulary_sha256"]:
            raise UserError(
                f"{path} was trained with another vocabulary ({facts.get('vocabulary_size')} tokens) than the one "
                f"given ({self.fingerprints['vocabulary_size']} tokens): use the run's own text and vocabulary."
            )
        text = self.fingerprints.get("train_tokens_sha256")
        if text is not None and facts.get("train_tokens_sha256") != text:
            raise UserError(
                f"The training text has changed since {path} was written: restore it, or start a new run with "
                "another --out."
            )

    def log(self, kind: str, record: dict[str, Any]) -> None:
        try:
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **record}) + "\n")
        except OSError as error:
            raise write_failure(self.journal, error) from error

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of the log; one that was cut short by a crash is left out."""
        found = []
        if self.journal.exists():
            for line in self.journal.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if kind is None or record.get("kind") == kind:
                    found.append(record)
        return found

    def forget_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that a run goes on from; it will be logged again."""
        kept = [r for r in self.records() if r.get("step", 0) <= step]
        write_text(self.journal, "".join(json.dumps(r) + "\n" for r in kept))

    def write_result(self, result: dict[str, Any]) -> None:
        write_json(self.result, {"format_version": RESULT_VERSION, **result})

    def read_result(self) -> dict[str, Any]:
        return read_json(self.result)
