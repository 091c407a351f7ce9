"""A trained model with its folder: how it is opened, and what can be done with it whatever its task."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdefine.data import (
    SPLITS,
    TokenFile,
    Tokenization,
    corpus_names,
    encode_corpus,
    licence_of,
    resolve_corpus,
)
from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.export import Exportable, ExportedFrom, export_model, on_the_cpu
from torchdefine.files import Progress, check_writable, from_home
from torchdefine.modes import evaluating
from torchdefine.recipe import short_name
from torchdefine.run.folder import RunFolder
from torchdefine.run.starting import without_paths
from torchdefine.spelling import option
from torchdefine.tables import Budget, Compressed, compress_embedding
from torchdefine.tables.cache import use_cache, use_compressed, write_cache, write_compressed
from torchdefine.task import find_task
from torchdefine.training.checkpoint import Checkpoint, load_weights
from torchdefine.training.distributed import Processes


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
        return list(self.model.embeddings().values())[-1]

    @property
    def names_of_tokens(self) -> Tokenization | None:
        """What the rows of ``embedding`` are called; None where they have no names to show."""
        return None

    def sample(self, prompt: str, length: int, seed: int) -> Sample | None:
        """Something that the model writes, where it can."""
        return None

    def token_counts(self) -> Sequence[int] | None:
        """How often each token occurs in the training text, if the run's folder has counts."""
        return self.folder.read_token_counts()

    def cache(self, dtype: str = "fp32", progress: Progress | None = None) -> dict[Path, int]:
        """Write the vectors of every embedding beside the weights; returns the files and their bytes."""
        files = self.beside_weights("cache", writable=True)
        return {file: write_cache(file, embedding, dtype, progress) for file, embedding in files.items()}

    def use_cache(self) -> None:
        """Look up the vectors that ``cache`` wrote, instead of computing them; refuses those of other weights."""
        for file, embedding in self.beside_weights("cache").items():
            use_cache(file, embedding)

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
        files, counts = self.beside_weights("compressed", writable=True), self.token_counts()
        made = {
            file: compress_embedding(embedding, method, budget, counts=counts, progress=progress, **settings)
            for file, embedding in files.items()
        }
        for file, one in made.items():
            write_compressed(file, files[file], one, {"vocabulary_sha256": self.tokenization.sha256})
        return made

    def use_compressed(self) -> None:
        """Look up the vectors that ``compress`` packed, instead of computing them; refuses those of other weights."""
        for file, embedding in self.beside_weights("compressed").items():
            use_compressed(file, embedding, {"vocabulary_sha256": self.tokenization.sha256})

    def beside_weights(self, what: str, writable: bool = False) -> dict[Path, TokenEmbedding]:
        """Where the vectors of each embedding go, cached or compressed; ``writable`` refuses where nothing can."""
        files = {
            self.weights.parent / f"{'-'.join([what, *name.split()])}.safetensors": embedding
            for name, embedding in self.model.embeddings().items()
        }
        for file in files if writable else ():
            check_writable(file)
        return files

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
        model = on_the_cpu(self.model)
        exportable, recipe = self.exportable(model), without_paths(self.recipe)
        about = ExportedFrom(
            name=recipe.name,
            description=recipe.description,
            task=recipe.task,
            config=recipe.to_yaml(),
            checkpoint=self.weights.parent.name,
            result=self.result if self.folder.result.exists() else None,
            corpus=recipe.data.corpus,
            data_licence=licence_of(self.recipe.data.corpus),
            licence=license,
        )
        with evaluating(model):
            return export_model(exportable, self.tokenization, about, folder, format, progress)


def load_run(
    path: str | Path,
    *,
    checkpoint: str = "best",
    device: str | None = None,
    cached: bool = False,
    compressed: bool = False,
) -> Any:
    """Open a run folder: ``load_run("runs/x").model``; ``checkpoint`` is "best", "last" or "average".

    With ``cached``, vectors are looked up that ``Run.cache`` wrote for these weights; with ``compressed``, those that
    ``Run.compress`` packed.
    """
    if cached and compressed:
        raise UserError("Vectors are looked up in the cache or in the compressed table: choose one of them.")
    if checkpoint not in ("best", "last", "average"):
        raise UserError(f"The checkpoint {checkpoint!r} is unknown: use best, last or average.")
    folder = RunFolder(path)
    recipe = folder.recipe()
    task = find_task(recipe.task)
    tokens = task.load_tokens(folder.path)
    folder.fingerprint(tokens, recipe)
    file: Path = getattr(folder, checkpoint)
    if checkpoint == "average" and not file.exists():
        make = f"torchdefine average {shlex.quote(str(folder.path))}"
        raise UserError(f"The run in {folder.path} has no average: make it with `{make}`.")
    if checkpoint == "best" and not file.exists() and folder.last.exists():
        use = f"{option('checkpoint')} last"
        raise UserError(f"The run in {folder.path} has not been validated yet, so it has no best weights: use {use}.")
    weights = folder.read(file, only="model")
    # The weights drawn here are thrown away: the caller's random numbers and default device stay.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = task.build(recipe, tokens)
    load_weights(model, weights, file)
    run = task.run(folder, recipe, tokens, model.to(Processes().device(device)).eval(), file)
    if cached:
        run.use_cache()
    if compressed:
        run.use_compressed()
    return run


def average_run(path: str | Path, last: int | None = None) -> tuple[RunFolder, list[int]]:
    """Average the ``last`` checkpoints that a run has kept, all by default; ``load_run`` then takes "average" too."""
    folder = RunFolder(path)
    recipe = folder.recipe()
    folder.fingerprint(find_task(recipe.task).load_tokens(folder.path), recipe)
    return folder, average_checkpoints(folder, last)


def average_checkpoints(folder: RunFolder, last: int | None = None) -> list[int]:
    """Write the mean of the ``last`` kept checkpoints, all by default, as the run's average; returns their steps."""
    kept = folder.kept()
    if len(kept) < 2:
        problem = f"The run in {folder.path} has kept {len(kept)} checkpoints, but an average needs two"
        raise UserError(f"{problem}: train with train.keep 5, say.")
    if last is not None and not 2 <= last <= len(kept):
        raise UserError(f"The run in {folder.path} has kept {len(kept)} checkpoints: average 2 to {len(kept)} of them.")
    chosen = kept[-last:] if last is not None else kept
    steps = [step for step, _ in chosen]
    mean = mean_weights([folder.read(path, only="model") for _, path in chosen])
    folder.write("average", Checkpoint(mean, {"averaged_steps": steps}))
    return steps


def mean_weights(checkpoints: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """The mean of every weight, added up in float64; other tensors, such as ranks, must be the same in all."""
    first = checkpoints[0].tensors
    if any(checkpoint.tensors.keys() != first.keys() for checkpoint in checkpoints):
        raise UserError("The checkpoints are of different models, so they have no average.")
    mean = {}
    for name, tensor in first.items():
        if tensor.is_floating_point():
            total = torch.stack([checkpoint.tensors[name].double() for checkpoint in checkpoints]).mean(0)
            mean[name] = total.to(tensor.dtype)
        elif all(torch.equal(tensor, checkpoint.tensors[name]) for checkpoint in checkpoints):
            mean[name] = tensor
        else:
            raise UserError(f"The checkpoints differ in {name}, which has no average: they are of different models.")
    return mean


def check_can(recipe: Any, what: str, folder: RunFolder) -> None:
    """Refuse a run of a task whose models cannot do something, such as "generate"."""
    if not hasattr(find_task(recipe.task).run, what):
        raise UserError(f"The run in {folder.path} is a model for {recipe.task}, which has no `{what}`.")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise UserError(
            f"The split {split!r} is unknown: use {', '.join(SPLITS[:-1])} or {SPLITS[-1]}, and name a text of your "
            f"own by {option('data')}."
        )


def text_of(run: Run, split: str, data: str | Path | TokenFile | None) -> TokenFile:
    """A split of a run's own corpus or of another one, or a single file as a test text, encoded as the run's is."""
    if isinstance(data, TokenFile):
        return data
    check_split(split)
    path = from_home("" if data is None else data)
    if path.is_file():
        if split != "test":
            raise UserError(f"{data} is a single file, which is read as a test text, not as {split}: use a folder.")
    elif data is not None and (len(path.parts) > 1 or path.suffix) and not path.exists():  # no name of a corpus
        raise UserError(
            f"There is no file or folder {data}: an evaluation takes a folder with texts, a text file, or one of "
            f"the corpora {', '.join(corpus_names())}."
        )
    else:
        path = resolve_corpus(run.recipe.data.corpus if data is None else data)
    return encode_corpus(path, vocabulary=run.tokenization, split=split).splits[split]
