"""What a task is: the sections of its recipes, its data, its model, and how a model is trained, measured and used.

The tasks themselves stand in ``tasks/``. No other room knows them by name.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from torchdefine import __version__
from torchdefine.config import Config, Kinds, defaults, to_plain
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.plain import write_yaml
from torchdefine.plugins import Plugged
from torchdefine.spelling import did_you_mean
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluation import Evaluation
from torchdefine.training.step import TrainingData

FORMAT_VERSION = 2
FACTS = ("name", "description", "published", "varies", "chosen", "task")
"""What a recipe says beside the settings of its sections."""
Section = Kinds | type[Config]
T = TypeVar("T", bound="type[Task]")


def section(of: Section, *, model: bool = False) -> Any:
    """A field of a recipe: the settings of a part, or of one of several kinds; ``model`` if it shapes the model."""
    return field(default_factory=lambda: of.read({}), metadata={"section": of, "model": model})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how a run turns out; each task adds its sections."""

    name: str = ""
    description: str = ""
    published: dict[str, float] = field(default_factory=dict)
    """Numbers of the paper for this row: millions of parameters by part, perplexities, BLEU."""
    varies: str = ""
    """The published row that this recipe changes, by its name."""
    chosen: str = ""
    """What the paper leaves open for its rows, and what we chose."""

    task: ClassVar[str]

    @classmethod
    def sections(cls) -> dict[str, Section]:
        return {f.name: f.metadata["section"] for f in dataclasses.fields(cls) if "section" in f.metadata}

    @classmethod
    def settings(cls) -> list[str]:
        """The names of all settings that such a recipe may have, whatever its kinds: optim.lr …"""
        return [f"{section}.{name}" for section, of in cls.sections().items() for name in of.names()]

    def require(self, holds: bool, sentence: str) -> None:
        """Refuse sections that do not go together."""
        if not holds:
            raise UserError(sentence)

    def to_plain(self) -> dict[str, Any]:
        """Plain values for YAML or JSON."""
        facts = {name: getattr(self, name) for name in FACTS}
        return {**facts, **{name: to_plain(getattr(self, name)) for name in self.sections()}}

    def bound_settings(self) -> dict[str, Any]:
        """What decides the weights and what is computed with them: all settings but paths, since files may be moved."""
        bound = {}
        for name in self.sections():
            config = getattr(self, name)
            paths = {f.name for f in dataclasses.fields(config) if f.metadata.get("path")}
            bound[name] = {own: value for own, value in to_plain(config).items() if own not in paths}
        return {"task": self.task, **bound}

    def defaults(self) -> dict[str, dict[str, Any]]:
        """The default of every setting of the kinds that the recipe has, by section."""
        return {
            name: of.defaults(getattr(self, name).kind) if isinstance(of, Kinds) else defaults(of)
            for name, of in self.sections().items()
        }

    def to_yaml(self) -> str:
        values = {"format_version": FORMAT_VERSION, "torchdefine_version": __version__, **self.to_plain()}
        return write_yaml(values)


class Tokens(Protocol):
    """The vocabulary of a run, or its tokenizers."""

    def __len__(self) -> int: ...

    @property
    def sha256(self) -> str: ...

    def save(self, path: str | Path) -> Path: ...


def described(data: Any, evaluations: Mapping[str, Any]) -> dict[str, Any]:
    """What every result says of its data and of its evaluations by split."""
    found = {split: evaluation.to_dict() for split, evaluation in evaluations.items()}
    return {
        "data": {
            "corpus": data.name,
            "vocabulary_size": len(data.tokenization),
            "vocabulary_sha256": data.tokenization.sha256,
            "splits": {split: text.facts() for split, text in data.splits.items()},
        },
        **{f"{split}_perplexity": one["perplexity"] for split, one in found.items()},
        "evaluation": found,
    }


class Task(ABC):
    """What a model is trained to do. A subclass in one folder is all that a new task needs."""

    name: ClassVar[str]
    recipe: ClassVar[type[Recipe]]
    run: ClassVar[type]
    """A ``Run``: what can be done with a trained model."""
    measured_on: ClassVar[str] = "FOLDER"
    """What ``eval --data`` takes."""
    vocabulary_settings: ClassVar[tuple[str, ...]] = ("corpus", "tokenizer")
    """Settings of the section data that decide the size of the vocabulary."""
    scores: ClassVar[Mapping[str, str]] = {}
    """Measures of a result beside its perplexities, each with its name in a comparison."""
    least_scores: ClassVar[Mapping[str, float]] = {}
    """The values of some of them below which a model has learned next to nothing."""

    def check_packages(self) -> None:
        """Refuse, before any work, to train without a package that the end of a run needs."""
        return

    @abstractmethod
    def open_data(self, recipe: Any, progress: Progress | None) -> Any:
        """The recipe's texts, encoded: ``tokenization``, and ``splits`` by the names train, valid and test.

        A split has a length, ``tokens_sha256``, and ``verify()``, which compares its data with that hash.
        """

    @abstractmethod
    def load_tokens(self, folder: Path) -> Any:
        """What the tokens' ``save`` wrote into a run's folder."""

    @abstractmethod
    def build(self, recipe: Any, tokens: Any, data: Any = None) -> nn.Module:
        """The model with fresh weights from torch's current random state.

        Without ``data`` its weights are about to be loaded.
        """

    @abstractmethod
    def count(self, recipe: Any, tokens: Any = None) -> tuple[nn.Module, int]:
        """The model without memory, and the size of its vocabulary: the recipe's, or that of ``tokens``."""

    @abstractmethod
    def batches(self, recipe: Any, data: Any, device: Any, processes: Processes) -> TrainingData:
        """The training text in the form that the loop expects."""

    @abstractmethod
    def validation(self, recipe: Any, data: Any, model: Any) -> Callable[[], Evaluation] | None:
        """What measures the current weights on the validation text; None where there is none."""

    @abstractmethod
    def result(self, run: Any, data: Any) -> dict[str, Any]:
        """What the result of a run says beside its training: that which is ``described``, and more."""

    def amount(self, data: Any) -> str:
        """How much training text there is, in words."""
        return f"{len(data.splits['train']):,} examples"

    def about_data(self, recipe: Any, data: Any) -> list[str]:
        """Sentences before training, on the vocabulary, say."""
        return []

    def token_counts(self, data: Any) -> Sequence[int] | None:
        """How often each token occurs in the training text, where the tokens themselves do not know it."""
        return None

    def headline(self, result: Mapping[str, Any]) -> list[str]:
        """Lines about a finished run, before its perplexities."""
        return []

    def caveats(self, result: Mapping[str, Any], recipe: Any, run: str = "RUN") -> dict[str, str]:
        """By split, what a reader must know about a perplexity; ``run`` is what a command calls the run."""
        return {}

    def encode(self, recipe: Any, out: str | Path, progress: Progress | None) -> Any:
        """The recipe's texts, encoded into a new folder that takes their place."""
        raise UserError(f"The data of the task {self.name} cannot be encoded beforehand: train on them as they are.")


_TASKS: Plugged[Task] = Plugged("task", {}, lambda task: task())


def register_task(task: T) -> T:
    """Make ``task: name`` in a recipe mean this task."""
    _TASKS.register(task.name, task())
    return task


def find_task(name: str | None = None) -> Task:
    """A task by name, else the default one; those of the package are imported when they are first needed."""
    name = str(name or _default())
    if name not in _TASKS and name in _own():
        import_module(f"torchdefine.tasks.{name}")
    if name not in _TASKS:
        raise UserError(f"The task {name!r} is unknown{did_you_mean(name, task_names())}")
    return _TASKS[name]


def task_names() -> list[str]:
    """All tasks, the default one first."""
    return sorted({*_own(), *_TASKS.names()}, key=lambda name: (name != _default(), name))


def _default() -> str:
    return import_module("torchdefine.tasks").DEFAULT


def _own() -> list[str]:
    """The tasks that come with the package: one folder each."""
    return [file.parent.name for file in (Path(__file__).parent / "tasks").glob("*/__init__.py")]
