"""A run is a folder: settings, vocabulary, log, checkpoints, result."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.files import (
    cache_folder,
    finite_only,
    is_unfinished,
    locked,
    read_json,
    write_failure,
    write_json,
    write_text,
)
from torchdefine.recipe import FILE_ENDINGS, RUN_SETTINGS_FILE, Recipe, load_recipe, recipe_names
from torchdefine.run.checkpoint_file import read_checkpoint, write_checkpoint
from torchdefine.spelling import option
from torchdefine.task import Tokens
from torchdefine.training.checkpoint import Checkpoint

RESULT_VERSION = 1
OF_THE_DATA = ("vocabulary_sha256", "splits")
"""What a result says of its texts, and without which it cannot be compared."""
TOKEN_COUNTS_VERSION = 1


TRAINED_BY = {"train": "training", "valid": "validation"}
"""The texts that decide what training does."""


class RunFolder:
    """The files of a run, and where each of them is."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / RUN_SETTINGS_FILE
        self.journal = self.path / "log.jsonl"
        self.result = self.path / "result.json"
        self.last = self.path / "last" / "checkpoint.safetensors"
        self.best = self.path / "best" / "checkpoint.safetensors"
        self.average = self.path / "average" / "checkpoint.safetensors"
        self.kept = self.path / "kept"
        """Checkpoints of the last validations, for ``average``, where the recipe asks for them."""
        self.token_counts = self.path / "token_counts.json"
        """How often each subword occurs in the training text; a vocabulary of words holds its counts itself."""
        self.fingerprints: dict[str, Any] = {}
        """Hashes that every checkpoint carries, so that it is never used with another vocabulary or text."""

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.config.exists()

    def write(self, which: Literal["last", "best"], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        path = self.best if which == "best" else self.last
        write_checkpoint(path, tensors, {**facts, **self.fingerprints})

    def read_last(self) -> Checkpoint | None:
        """The checkpoint to go on from, if it is of this run's texts and vocabulary; None where there is none."""
        return self.read(self.last) if self.last.exists() else None

    def read(self, path: Path, *, only: str | None = None) -> Checkpoint:
        """A checkpoint of this run, or of another one with the same vocabulary."""
        checkpoint = read_checkpoint(path, only=only)
        self.check_fingerprints(checkpoint.facts, path)
        return checkpoint

    def check_free(self) -> None:
        """Refuse a place that holds a run, or anything else: a run has a folder of its own."""
        if self.exists():
            raise UserError(
                f"{self.path} holds a run already: go on with it by {option('resume')}, or choose another folder."
            )
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file, but a run is a folder: choose another {option('out')}.")
        files = self.path.iterdir() if self.path.is_dir() else []
        found = sorted(file.name for file in files if not is_unfinished(file))  # a run may be killed as it starts
        if found:
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise UserError(f"{self.path} holds {shown} already, but no run: choose another {option('out')}.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here; the lock ends with the process, however it ends.

        It lies in the cache, so that a folder that turns out not to be free is left untouched; processes with another
        cache do not see it.
        """
        name = hashlib.sha256(str(self.path.resolve()).encode(errors="surrogateescape")).hexdigest()
        refusal = f"Another process is training in {self.path}: wait for it, or choose another {option('out')}."
        with locked(cache_folder() / "locks" / name, refusal):
            yield

    def create(self, recipe: Recipe, tokenization: Tokens) -> None:
        """Start a new run here; a place that is not free is left alone."""
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"The folder {self.path} cannot be made ({error.strerror}): choose another {option('out')}."
            ) from error
        write_text(self.config, recipe.to_yaml())  # first: from here on a run that is killed can go on
        tokenization.save(self.path)

    def recipe(self) -> Any:
        if not self.exists():
            self._refuse_recipe()
            raise UserError(f"{self.path} holds no run: {self._what_to_name_instead()}")
        return load_recipe(str(self.config))

    def bring_up_to_date(self, recipe: Any, tokenization: Tokens) -> None:
        """Before a run goes on, record where its text and tokenizer lie now, and rewrite its vocabulary."""
        tokenization.save(self.path)
        own = self.recipe()
        if own.data != recipe.data:
            write_text(self.config, replace(own, data=recipe.data).to_yaml())

    def _refuse_recipe(self) -> None:
        """A recipe is easily named in place of a run trained by it."""
        path = self.path
        if path.name == RUN_SETTINGS_FILE and path.is_file():
            raise UserError(f"{path} is the recipe of a run: name the run's folder, {path.parent}.")
        is_shipped = not path.exists() and str(path) in recipe_names()
        if is_shipped or (path.suffix in FILE_ENDINGS and path.is_file()):
            train = f"torchdefine train {shlex.quote(str(path))} --out FOLDER"
            raise UserError(f"{path} is a recipe and no run: train it first by `{train}`, and name that folder.")

    def _what_to_name_instead(self) -> str:
        if not self.path.exists():
            return "there is no such folder."
        within = sorted(config.parent for config in self.path.glob(f"*/{RUN_SETTINGS_FILE}"))
        if not within:
            return f"{RUN_SETTINGS_FILE} is missing."
        shown = ", ".join(map(str, within[:6])) + (f" and {len(within) - 6} more" if len(within) > 6 else "")
        return f"name a run that lies in it, such as {shown}."

    def fingerprint(self, tokenization: Tokens, tokens_sha256: Mapping[str, str] | None = None) -> None:
        """Set the vocabulary, and in training the texts by split, that belong to this run."""
        self.fingerprints = {"vocabulary_sha256": tokenization.sha256, "vocabulary_size": len(tokenization)}
        texts = tokens_sha256 or {}
        self.fingerprints |= {f"{split}_tokens_sha256": texts[split] for split in TRAINED_BY if split in texts}

    def check_fingerprints(self, facts: dict[str, Any], path: Path) -> None:
        """Refuse a checkpoint that was written with another vocabulary, or to go on training on another text."""
        self._check_vocabulary(facts, path)
        if "train_tokens_sha256" not in self.fingerprints:
            return
        for split, called in TRAINED_BY.items():
            own = self.fingerprints.get(f"{split}_tokens_sha256")
            if facts.get(f"{split}_tokens_sha256", own) != own:
                raise UserError(
                    f"The {called} text has changed since {path} was written: restore it, or start a new run in "
                    "another folder."
                )

    def _check_vocabulary(self, facts: dict[str, Any], path: Path) -> None:
        if facts.get("vocabulary_sha256") != self.fingerprints["vocabulary_sha256"]:
            theirs, ours = facts.get("vocabulary_size"), self.fingerprints["vocabulary_size"]
            sizes = "of as many tokens" if theirs == ours else f"of {theirs} tokens, where {ours} were found"
            raise UserError(
                f"{path} was trained with another vocabulary, {sizes}: use the run's own text and vocabulary."
            )

    def write_token_counts(self, counts: Sequence[int]) -> None:
        facts = {"format_version": TOKEN_COUNTS_VERSION, "vocabulary_sha256": self.fingerprints["vocabulary_sha256"]}
        write_json(self.token_counts, {**facts, "counts": list(counts)})

    def read_token_counts(self) -> list[int] | None:
        """One number for each token; None where the run kept none."""
        if not self.token_counts.exists():
            return None
        kept = read_json(self.token_counts)
        if kept.get("format_version") != TOKEN_COUNTS_VERSION:
            raise UserError(
                f"{self.token_counts} has format version {kept.get('format_version')}; this torchdefine reads "
                f"{TOKEN_COUNTS_VERSION}."
            )
        counts: Any = kept.get("counts")
        whole = (
            isinstance(counts, list)
            and len(counts) == self.fingerprints["vocabulary_size"]
            and all(isinstance(count, int) and count >= 0 for count in counts)
        )
        if kept.get("vocabulary_sha256") != self.fingerprints["vocabulary_sha256"] or not whole:
            raise UserError(
                f"{self.token_counts} does not belong to this run's vocabulary, or is damaged: restore it, or remove "
                "it to do without counts."
            )
        return list(counts)

    def log_start(self, step: int, changes: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Log that training begins or goes on at a step, and with which changes to the recipe."""
        self.log("start", {"step": step, "overrides": changes, **facts})

    def changes(self) -> dict[str, dict[str, Any]]:
        """What was changed of the recipe when the run was started, by section."""
        started = self.records("start")
        return started[0].get("overrides", {}) if started else {}

    def log(self, kind: str, record: dict[str, Any]) -> None:
        try:
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(_line({"kind": kind, **record}))
        except OSError as error:
            raise write_failure(self.journal, error) from error

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of the log; one that is damaged or was cut short by a crash is left out."""
        found = []
        if self.journal.exists():
            for line in self.journal.read_text(encoding="utf-8", errors="replace").split("\n"):
                try:
                    record = _restored(json.loads(line))
                except json.JSONDecodeError:
                    continue
                whole = isinstance(record, dict) and isinstance(record.get("step"), int)
                if whole and (kind is None or record.get("kind") == kind):
                    found.append(record)
        return found

    def forget_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that a run goes on from; it will be logged again.

        The first start stays in any case: nothing else knows what was changed of the recipe.
        """
        records = self.records()
        first_start = next((r for r in records if r.get("kind") == "start"), None)
        kept = [r for r in records if r["step"] <= step or r is first_start]
        write_text(self.journal, "".join(map(_line, kept)))

    def write_result(self, result: dict[str, Any]) -> None:
        write_json(self.result, {"format_version": RESULT_VERSION, **result})

    def read_result(self) -> dict[str, Any]:
        result = read_json(self.result)
        version = result.get("format_version")
        if version != RESULT_VERSION:
            raise UserError(f"{self.result} has format version {version}; this torchdefine reads {RESULT_VERSION}.")
        needed = ("recipe", "settings", "parameters", "data", "steps", "tokens", "seconds", "evaluation", "curve")
        missing = [name for name in needed if name not in result]
        if "data" in result:
            missing += [f"data.{name}" for name in OF_THE_DATA if name not in (result["data"] or {})]
        if missing:
            raise UserError(f"{self.result} is damaged: it lacks {', '.join(missing)}.")
        restored: dict[str, Any] = _restored(result)
        return restored


def _line(record: dict[str, Any]) -> str:
    return json.dumps(finite_only(record), allow_nan=False) + "\n"


def _restored(value: Any) -> Any:
    """The values read, with null losses and perplexities as infinite ones."""
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: math.inf if item is None and _is_measure(name) else _restored(item) for name, item in value.items()}


def _is_measure(name: str) -> bool:
    """Whether a value of this name is always a number, so that null means that it was not finite."""
    return name in ("loss", "perplexity") or name.endswith("_perplexity")
