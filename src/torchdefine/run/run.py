"""A trained model with its folder, and what can be done with it whatever its task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdefine.data import Tokenization
from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.export import Exportable
from torchdefine.files import Progress, check_writable
from torchdefine.recipe import short_name
from torchdefine.run.folder import RunFolder
from torchdefine.spelling import option
from torchdefine.tables import Budget, Compressed, compress_embedding
from torchdefine.tables.cache import use_cache, use_compressed, write_cache, write_compressed

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Measured:
    """What `eval` found, for people and for programs."""

    lines: list[str]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """What a model writes, for a report."""

    lead: str = ""
    """A sentence that goes before the samples of all runs that have the same."""
    text: str = ""
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    """Header and rows."""
    note: str = ""


@dataclass(repr=False)
class Run:
    """A trained model with its tokens, settings and result; each task has its own kind of it."""

    folder: RunFolder
    recipe: Any
    tokenization: Any
    """The vocabulary or the tokenizers of the run."""
    model: Any
    weights: Path
    """The checkpoint that the model's weights came from."""

    @abstractmethod
    def measure(
        self, split: str = "test", *, data: str | Path | None = None, progress: Progress | None = None
    ) -> Measured:
        """Evaluate on a split of the run's own data, or of others; a task may have more settings."""

    def exportable(self, model: Any) -> Exportable:
        """What an export contains of the model, which is in evaluation mode, in float32 and on the CPU."""
        raise UserError(f"A model for {self.recipe.task} cannot be exported.")

    def __repr__(self) -> str:
        measured = "not finished"
        if self.folder.result.exists():
            scores = {split: self.result.get(f"{split}_perplexity") for split in ("test", "valid")}
            found = [f"{split} perplexity {score:,.2f}" for split, score in scores.items() if score is not None]
            measured = found[0] if found else "nothing measured"
        parameters = self.model.parameters_by_part()["total"]
        return f"Run({self.folder.path}: {short_name(self.recipe.name)}, {parameters:,} parameters, {measured})"

    @property
    def result(self) -> dict[str, Any]:
        return self.folder.read_result()

    @property
    def embedding(self) -> TokenEmbedding:
        """The embedding that pictures and neighbours show; for a translator, that of the target side."""
        found: TokenEmbedding = list(self.model.embeddings().values())[-1]
        return found

    @property
    def names_of_tokens(self) -> Tokenization | None:
        """What the rows of ``embedding`` are called; None where they have no names to show."""
        return None

    def sample(self, prompt: str, length: int, seed: int) -> Sample | None:
        """Something that the model writes, where it can."""
        return None

    def cache(self, dtype: str = "fp32", progress: Progress | None = None) -> dict[Path, int]:
        """Write the vectors of every embedding beside the weights; returns the files and their bytes."""
        files = self.cache_files()
        for file in files:
            check_writable(file)
        return {file: write_cache(file, embedding, dtype, progress) for file, embedding in files.items()}

    def use_cache(self) -> None:
        """Look up the vectors that ``cache`` wrote, instead of computing them; refuses those of other weights."""
        for file, embedding in self.cache_files().items():
            use_cache(file, embedding)

    def cache_files(self) -> dict[Path, TokenEmbedding]:
        """Where the cached vectors of each embedding go."""
        return self._beside_weights("cache")

    def compress(
        self,
        method: str = "bits",
        budget: int | str | Budget | None = None,
        *,
        progress: Progress | None = None,
        **settings: Any,
    ) -> dict[Path, Compressed]:
        """Pack the vectors of every embedding into a file beside the weights; returns the files and their sizes.

        The arguments are those of ``tables.compress_embedding``.
        """
        files, counts = self.compressed_files(), self.token_counts()
        for file in files:
            check_writable(file)
        made = {
            file: compress_embedding(embedding, method, budget, counts=counts, progress=progress, **settings)
            for file, embedding in files.items()
        }
        for file, one in made.items():
            write_compressed(file, files[file], one, self._vocabulary_facts())
        return made

    def use_compressed(self) -> None:
        """Look up the vectors that ``compress`` packed, instead of computing them; refuses those of other weights."""
        for file, embedding in self.compressed_files().items():
            use_compressed(file, embedding, self._vocabulary_facts())

    def compressed_files(self) -> dict[Path, TokenEmbedding]:
        """Where the packed vectors of each embedding go."""
        return self._beside_weights("compressed")

    def token_counts(self) -> Sequence[int] | None:
        """How often each token occurs in the training text, if the run's folder has counts."""
        return self.folder.read_token_counts()

    def _vocabulary_facts(self) -> dict[str, Any]:
        return {"vocabulary_sha256": self.tokenization.sha256}

    def _beside_weights(self, what: str) -> dict[Path, TokenEmbedding]:
        folder = self.weights.parent
        return {
            folder / f"{'-'.join([what, *name.split()])}.safetensors": embedding
            for name, embedding in self.model.embeddings().items()
        }

    def export(
        self,
        folder: str | Path,
        format: str = "torch-export",
        *,
        license: str | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Write the model into a new folder as programs that run without torchdefine; returns export.json's contents.

        ``format`` is "torch-export" or "onnx". Every program is compared with the model before the folder appears.
        """
        from torchdefine.run.exporting import export_run

        return export_run(self, folder, format, license, progress)


def check_can(recipe: Any, what: str, folder: RunFolder) -> None:
    """Refuse a run of a task whose models cannot do something, such as "generate"."""
    from torchdefine.task import find_task

    if not hasattr(find_task(recipe.task).run, what):
        raise UserError(f"The run in {folder.path} is a model for {recipe.task}, which has no `{what}`.")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise UserError(
            f"The split {split!r} is unknown: use {', '.join(SPLITS[:-1])} or {SPLITS[-1]}, and name a text of your "
            f"own by {option('data')}."
        )
