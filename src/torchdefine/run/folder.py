"""A run is a folder: settings, vocabulary, log, checkpoints, result.

Every file but the settings and the vocabulary carries a seal, the hash of all that is in it, and the name of the run.
A checkpoint carries hashes of the vocabulary and of the settings too, so that no file of another run takes the place of
one of these, and no setting can be changed under weights that were trained with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from torchdefine.errors import MachineError, UserError
from torchdefine.files import (
    cache_folder,
    check_is_file,
    check_path,
    finite_only,
    is_unfinished,
    locked,
    read_json,
    read_sealed,
    read_text,
    seal_of,
    write_failure,
    write_sealed,
    write_text,
)
from torchdefine.plain import read_json as parse_json
from torchdefine.recipe import FILE_ENDINGS, RUN_SETTINGS_FILE, load_recipe, recipe_names
from torchdefine.run.checkpoint_file import read_checkpoint, write_checkpoint
from torchdefine.spelling import listed, option
from torchdefine.task import Tokens
from torchdefine.training.checkpoint import Checkpoint

FORMAT_VERSION = 1
"""Of results and token counts."""
RESTORE = "restore it, or train again"
IN_A_RESULT = ("recipe", "settings", "parameters", "data", "steps", "tokens", "seconds", "evaluation", "curve")
OF_THE_DATA = ("vocabulary_sha256", "splits")
"""What a result says of its texts, and without which it cannot be compared."""
TRAINED_BY = {"train": "training", "valid": "validation"}
"""The texts that decide what training does."""


_IDENTITY = re.compile(r"^# run ([0-9a-f]{32})$", re.MULTILINE)
_LONGEST_LINE = 1 << 20
"""Of a log, in bytes."""
_log = logging.getLogger(__name__)


class RunFolder:
    """The files of a run, and where each of them is."""

    def __init__(self, path: str | Path) -> None:
        self.path = check_path(path)
        self.config = self.path / RUN_SETTINGS_FILE
        self.journal = self.path / "log.jsonl"
        self.result = self.path / "result.json"
        self.last = self.path / "last" / "checkpoint.safetensors"
        self.best = self.path / "best" / "checkpoint.safetensors"
        self.average = self.path / "average" / "checkpoint.safetensors"
        self.token_counts = self.path / "token_counts.json"
        """How often each subword occurs in the training text; a vocabulary of words holds its counts itself."""
        self.fingerprints: dict[str, Any] = {}
        """Hashes that every checkpoint carries, so that it is never used with another vocabulary, text or settings."""
        self._identity = ""
        self._held: ExitStack | None = None

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.config.exists()

    def identity(self) -> str:
        """The name that all files of this run carry; empty before it has begun."""
        if not self._identity:
            self._identity = self._identity_on_disk()
        return self._identity

    def _identity_on_disk(self) -> str:
        found = _IDENTITY.search(read_text(self.config)) if self.exists() else None
        return found[1] if found else ""

    def _check_still_here(self) -> None:
        """Refuse to write beside what is gone, or into a run that has taken this one's place."""
        if self.identity() != self._identity_on_disk():
            raise MachineError(f"The run in {self.path} was removed or replaced while it was in use, so it ends here.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here; the lock ends with the process, however it ends.

        It lies in the cache, so that a folder that turns out not to be free is left untouched, and in the run's folder
        once there is one, for processes with another cache.
        """
        name = hashlib.sha256(str(self.path.resolve()).encode(errors="surrogateescape")).hexdigest()
        with ExitStack() as self._held:
            self._held.enter_context(locked(cache_folder() / "locks" / name, self._refusal))
            if self.exists():
                self._lock_folder()
            yield

    def _lock_folder(self) -> None:
        if self._held is not None:
            self._held.enter_context(locked(self.path / "training", self._refusal))

    @property
    def _refusal(self) -> str:
        return f"Another process is training in {self.path}: wait for it, or choose another {option('out')}."

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
            raise UserError(
                f"{self.path} holds {listed(found, 3)} already, but no run: choose another {option('out')}."
            )

    def begin(self, recipe: Any, tokens: Tokens, resume: bool = False) -> None:
        """Write what the run is; of one that goes on, where its text and tokenizer lie now."""
        if resume:
            sections = {name: getattr(recipe, name) for name in recipe.sections()}
            recipe = replace(self.recipe(), **sections)
        else:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise write_failure(self.config, error) from error
            self._lock_folder()
            self.check_free()  # another process may have been here since
            self._identity = uuid4().hex
        # First: from here on a run that is killed can go on.
        write_text(self.config, f"{recipe.to_yaml()}# run {self.identity()}\n")
        tokens.save(self.path)

    def recipe(self) -> Any:
        """The run's recipe; what is no run is refused with what to name instead."""
        if self.exists():
            return load_recipe(str(self.config))
        path = self.path
        if path.name == RUN_SETTINGS_FILE and path.is_file():
            raise UserError(f"{path} is the recipe of a run: name the run's folder, {path.parent}.")
        is_shipped = not path.exists() and str(path) in recipe_names()
        if is_shipped or (path.suffix in FILE_ENDINGS and path.is_file()):
            train = f"torchdefine train {shlex.quote(str(path))} --out FOLDER"
            raise UserError(f"{path} is a recipe and no run: train it first by `{train}`, and name that folder.")
        cure = f"{RUN_SETTINGS_FILE} is missing" if path.exists() else "there is no such folder"
        if within := sorted(str(config.parent) for config in path.glob(f"*/{RUN_SETTINGS_FILE}")):
            cure = f"name a run that lies in it, such as {listed(within, 6)}"
        raise UserError(f"{path} holds no run: {cure}.")

    def fingerprint(self, tokens: Tokens, recipe: Any, data: Any = None) -> None:
        """Set the vocabulary and the settings, and in training the texts by split, that belong to this run."""
        self.fingerprints = {
            "vocabulary_sha256": tokens.sha256,
            "vocabulary_size": len(tokens),
            "counts_sha256": seal_of(getattr(tokens, "counts", None)),
            "settings_sha256": seal_of(recipe.bound_settings()),
        }
        splits = data.splits if data is not None else {}
        self.fingerprints |= {
            f"{split}_tokens_sha256": splits[split].tokens_sha256 for split in TRAINED_BY if split in splits
        }

    def write(self, which: Literal["last", "best", "average"], checkpoint: Checkpoint) -> None:
        self._write(self.path / which / "checkpoint.safetensors", checkpoint)

    def _write(self, path: Path, checkpoint: Checkpoint) -> None:
        self._check_still_here()
        own = {**self.fingerprints, "run": self.identity()}
        write_checkpoint(path, checkpoint.tensors, {**checkpoint.facts, **own})

    def keep(self, checkpoint: Checkpoint, step: int, count: int) -> None:
        """Keep the weights of a step beside those of earlier ones, and only the ``count`` latest of them."""
        self._write(self.path / "kept" / f"step-{step}.safetensors", checkpoint)
        for _, older in self.kept()[:-count]:
            older.unlink(missing_ok=True)

    def kept(self) -> list[tuple[int, Path]]:
        """The steps whose weights were kept for ``average``, and where, from the first to the last."""
        found = [(path.stem.removeprefix("step-"), path) for path in self.path.glob("kept/step-*.safetensors")]
        return sorted((int(step), path) for step, path in found if step.isdecimal() and len(step) < 19)

    def read_last(self) -> Checkpoint | None:
        """The checkpoint to go on from, if it is of this run's texts and vocabulary; None where there is none."""
        return self.read(self.last) if self.last.exists() else None

    def read(self, path: Path, *, only: str | None = None) -> Checkpoint:
        """A checkpoint of this run: of its vocabulary, its settings and, in training, its texts."""
        checkpoint = read_checkpoint(path, only=only)
        facts, own = checkpoint.facts, {**self.fingerprints, "run": self.identity()}
        if facts.get("vocabulary_sha256") != own["vocabulary_sha256"]:
            theirs, ours = facts.get("vocabulary_size"), own["vocabulary_size"]
            sizes = "of as many tokens" if theirs == ours else f"of {theirs} tokens, where {ours} were found"
            raise UserError(
                f"{path} was trained with another vocabulary, {sizes}: use the run's own text and vocabulary."
            )
        for split, called in TRAINED_BY.items():
            name = f"{split}_tokens_sha256"
            if "train_tokens_sha256" in own and facts.get(name, own.get(name)) != own.get(name):
                raise UserError(
                    f"The {called} text has changed since {path} was written: restore it, or start a new run in "
                    "another folder."
                )
        for name, what, cure in (
            ("run", "belongs to another run than that", "put the run's own file back"),
            ("counts_sha256", "was trained with other counts of words than those", "restore the run's vocabulary"),
            ("settings_sha256", "was trained with other settings than those", f"restore {self.config.name}"),
        ):
            if facts.get(name) != own.get(name):
                raise UserError(f"{path} {what} in {self.path}: {cure}, or train a new run in another folder.")
        return checkpoint

    def write_token_counts(self, counts: Sequence[int]) -> None:
        facts = {"format_version": FORMAT_VERSION, "vocabulary_sha256": self.fingerprints["vocabulary_sha256"]}
        write_sealed(self.token_counts, {**facts, "counts": list(counts)})

    def read_token_counts(self) -> list[int] | None:
        """One number for each token; None where the run kept none."""
        if not self.token_counts.exists():
            return None
        kept, own = _of_this_version(self.token_counts), self.fingerprints
        counts: Any = kept.get("counts")
        whole = isinstance(counts, list) and all(isinstance(count, int) and count >= 0 for count in counts)
        fits = whole and len(counts) == own["vocabulary_size"]
        if not fits or kept.get("vocabulary_sha256") != own["vocabulary_sha256"]:
            raise UserError(f"{self.token_counts} does not belong to this run's vocabulary, or is damaged: {RESTORE}.")
        return list(counts)

    def log(self, kind: str, record: Mapping[str, Any]) -> None:
        self._check_still_here()
        try:
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(self._line({"kind": kind, **record}))
        except OSError as error:
            raise write_failure(self.journal, error) from error

    def _line(self, record: Mapping[str, Any]) -> str:
        sealed = {**finite_only(record), "seal": self._seal(record)}
        return json.dumps(sealed, allow_nan=False) + "\n"

    def _seal(self, record: Mapping[str, Any]) -> str:
        """Short, since a line is."""
        return seal_of([self.identity(), record])[:16]

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of the log; those that are damaged, cut short by a crash or of another run are left out."""
        found, left_out = [], 0
        if self.journal.exists():
            check_is_file(self.journal)
            with self.journal.open("rb") as file:
                while line := file.readline(_LONGEST_LINE):
                    record = self._record(line)
                    left_out += record is None
                    if record is not None and (kind is None or record.get("kind") == kind):
                        found.append(record)
        if left_out:
            _log.warning("%s: %d lines are damaged, or of another run, and are left out.", self.journal, left_out)
        return found

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = parse_json(line.decode(), "the line")
        except ValueError:
            return None
        if not isinstance(record, dict) or record.pop("seal", None) != self._seal(record):
            return None
        restored: dict[str, Any] = _restored(record)
        return restored if isinstance(record.get("step"), int) else None

    def changes(self) -> dict[str, dict[str, Any]]:
        """What was changed of the recipe when the run was started, by section."""
        started = self.records("start")
        return started[0].get("overrides", {}) if started else {}

    def forget_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that a run goes on from; it will be logged again.

        The first start stays in any case: nothing else knows what was changed of the recipe.
        """
        records = self.records()
        first_start = next((r for r in records if r.get("kind") == "start"), None)
        kept = [r for r in records if r["step"] <= step or r is first_start]
        write_text(self.journal, "".join(map(self._line, kept)))

    def write_result(self, result: Mapping[str, Any]) -> None:
        self._check_still_here()
        write_sealed(self.result, {"format_version": FORMAT_VERSION, "run": self.identity(), **result})

    def read_result(self) -> dict[str, Any]:
        result = _of_this_version(self.result)
        missing = [name for name in IN_A_RESULT if name not in result]
        if "data" in result:
            missing += [f"data.{name}" for name in OF_THE_DATA if name not in (result["data"] or {})]
        if missing:
            raise UserError(f"{self.result} is damaged: it lacks {', '.join(missing)}.")
        if result["run"] != self.identity():
            raise UserError(f"{self.result} belongs to another run than that in {self.path}: {RESTORE}.")
        restored: dict[str, Any] = _restored(result)
        return restored


def _of_this_version(path: Path) -> dict[str, Any]:
    version = read_json(path).get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version}; this torchdefine reads {FORMAT_VERSION}.")
    return read_sealed(path, RESTORE)


def _restored(value: Any) -> Any:
    """The values read, with null losses and perplexities as infinite ones: null stands for what was not finite."""
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    measures = {name for name in value if name in ("loss", "perplexity") or name.endswith("_perplexity")}
    return {name: math.inf if item is None and name in measures else _restored(item) for name, item in value.items()}
