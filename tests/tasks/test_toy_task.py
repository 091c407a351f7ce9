"""A task that the package does not know, from its recipe to a report: all that a new task needs stands in this file."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.commands import printed
from torchdefine import UserError, load_recipe, load_run, register_task, task, train
from torchdefine.config import Config, setting
from torchdefine.embedding import EMBEDDINGS, UNITS, MapConfig, TokenEmbedding, VocabularyFacts, build_embedding
from torchdefine.embedding.token_embedding import count_parameters
from torchdefine.output import Losses
from torchdefine.run import Run
from torchdefine.run.checkpoint_file import read_checkpoint
from torchdefine.run.run import Measured
from torchdefine.task import Recipe, Task, described, section
from torchdefine.training import AVERAGING, OPTIMIZERS, SCHEDULES, ConstantConfig, Interrupted, OptimizerConfig
from torchdefine.training.evaluation import Evaluation, perplexity
from torchdefine.training.loop import TrainConfig
from torchdefine.training.progress import Reporter
from torchdefine.training.step import Batch, Part


@dataclass(frozen=True)
class BagsConfig(Config):
    """Bags of tokens that are drawn, not read."""

    tokens: int = setting(30, "How many different tokens there are.", at_least=2)
    length: int = setting(6, "Tokens in a bag.", at_least=1)
    bags: int = setting(300, "Bags to learn from.", at_least=1)


@dataclass(frozen=True)
class BagTrainConfig(TrainConfig):
    """How a counter is trained."""

    batch_size: int = setting(20, "Bags in a batch.", at_least=1)


@dataclass(frozen=True)
class BagRecipe(Recipe):
    """How many tokens of a bag are odd?"""

    task = "bags"
    data: BagsConfig = section(BagsConfig)
    embedding: MapConfig = section(EMBEDDINGS, model=True)
    unit: Config = section(UNITS, model=True)
    optim: OptimizerConfig = section(OPTIMIZERS)
    schedule: ConstantConfig = section(SCHEDULES)
    averaging: Config = section(AVERAGING)
    train: BagTrainConfig = section(BagTrainConfig)


@dataclass(frozen=True)
class BagTokens:
    """The tokens are numbers, so there is nothing but how many."""

    size: int

    def __len__(self) -> int:
        return self.size

    @property
    def sha256(self) -> str:
        return hashlib.sha256(str(self.size).encode()).hexdigest()

    def save(self, path: str | Path) -> Path:
        file = Path(path) / "bag-tokens.json"
        file.write_text(json.dumps(self.size))
        return file


@dataclass(frozen=True)
class Bags:
    ids: np.ndarray  # (N, length)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def numbers(self) -> np.ndarray:
        return (self.ids % 2).sum(1)

    @property
    def tokens_sha256(self) -> str:
        return hashlib.sha256(self.ids.tobytes()).hexdigest()

    def verify(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {"tokens": len(self), "text_sha256": self.tokens_sha256, "tokens_sha256": self.tokens_sha256}


@dataclass(frozen=True)
class BagData:
    splits: dict[str, Bags]
    tokenization: BagTokens
    name: str = "drawn bags"


class BagModel(nn.Module):
    """The sum of the vectors says the number."""

    def __init__(self, embedding: TokenEmbedding, length: int) -> None:
        super().__init__()
        self.embedding: TokenEmbedding = embedding
        self.number = nn.Linear(embedding.embedding_dim, length + 1)

    def forward(self, ids: Tensor, numbers: Tensor, state: None, hint: None = None) -> tuple[Losses, None]:
        summed = F.dropout(self.embedding(ids).sum(1), 0.1, self.training)  # (B, m)
        loss = F.cross_entropy(self.number(summed), numbers)
        return Losses(loss, loss), None

    def initial_state(self, batch_size: int) -> None:
        return None

    def host_hint(self, targets: np.ndarray) -> None:
        return None

    def embeddings(self) -> dict[str, TokenEmbedding]:
        return {"": self.embedding}

    def compile_parts(self) -> None:
        self.embedding.compile()

    def parameters_by_part(self) -> dict[str, int]:
        return count_parameters(self, [self.embedding], self.number)


class BagBatches:
    rows_per_part = 0

    def __init__(self, bags: Bags, config: BagTrainConfig) -> None:
        self.bags, self.config = bags, config
        self.steps_per_epoch = len(bags) / config.batch_size
        self.total_steps = config.steps or round((config.epochs or 1) * self.steps_per_epoch)

    def batch(self, step: int) -> Batch:
        chosen = np.random.default_rng([self.config.seed, step]).integers(0, len(self.bags), self.config.batch_size)
        ids, numbers = self.bags.ids[chosen], self.bags.numbers[chosen]
        return Batch([Part((torch.from_numpy(ids), torch.from_numpy(numbers)), numbers)], tokens=len(numbers))

    def epoch_after(self, steps: int) -> float:
        return steps / self.steps_per_epoch


class BagRun(Run):
    def measure(self, split: str = "test", *, data: Any = None, progress: Any = None, top: int = 1) -> Measured:
        evaluation, right = evaluate(self.model, BagTask().open_data(self.recipe, None).splits[split])
        return Measured([f"{right:.1%} are right"], {**evaluation.to_dict(), "right": right})

    def count(self, ids: list[int]) -> int:
        return int(self.model.number(self.model.embedding(torch.tensor([ids])).sum(1)).argmax())


@torch.no_grad()
def evaluate(model: BagModel, bags: Bags) -> tuple[Evaluation, float]:
    training = model.training
    model.eval()
    logits = model.number(model.embedding(torch.from_numpy(bags.ids)).sum(1))
    numbers = torch.from_numpy(bags.numbers)
    model.train(training)
    loss = float(F.cross_entropy(logits, numbers))
    right = float((logits.argmax(-1) == numbers).double().mean())
    return Evaluation(len(bags), loss, perplexity(loss), None, 0.0, "every bag counted once"), right


class BagTask(Task):
    """Count the odd tokens of a bag."""

    name = "bags"
    recipe = BagRecipe
    run = BagRun
    vocabulary_settings = ("tokens",)
    scores: ClassVar = {"test_right": "right"}

    def open_data(self, recipe: BagRecipe, progress: Any) -> BagData:
        config = recipe.data
        splits = {
            name: Bags(np.random.default_rng(seed).integers(0, config.tokens, (size, config.length)))
            for seed, (name, size) in enumerate({"train": config.bags, "valid": 50, "test": 50}.items())
        }
        return BagData(splits, BagTokens(config.tokens))

    def load_tokens(self, folder: Path) -> BagTokens:
        return BagTokens(json.loads((folder / "bag-tokens.json").read_text()))

    def build(self, recipe: BagRecipe, tokens: BagTokens, data: BagData | None = None) -> BagModel:
        embedding = build_embedding(recipe.embedding, recipe.unit, VocabularyFacts(len(tokens)))
        return BagModel(embedding, recipe.data.length)

    def count(self, recipe: BagRecipe, tokens: BagTokens | None = None) -> tuple[BagModel, int]:
        tokens = tokens or BagTokens(recipe.data.tokens)
        with torch.device("meta"):
            return self.build(recipe, tokens), len(tokens)

    def batches(self, recipe: BagRecipe, data: BagData, device: Any, processes: Any) -> BagBatches:
        return BagBatches(data.splits["train"], recipe.train)

    def validation(self, recipe: BagRecipe, data: BagData, model: BagModel) -> Any:
        return lambda: evaluate(model, data.splits["valid"])[0]

    def result(self, run: BagRun, data: BagData) -> dict[str, Any]:
        found = {split: evaluate(run.model, data.splits[split]) for split in ("valid", "test")}
        result = described(data, {split: evaluation for split, (evaluation, _) in found.items()})
        return {**result, **{f"{split}_right": right for split, (_, right) in found.items()}}

    def headline(self, result: Any) -> list[str]:
        return [f"{result['test_right']:.1%} are right"]


RECIPE = """description: A counter of odd tokens
task: bags
embedding: {map_dim: 8}
unit: {kind: define, embedding_dim: 16, expand_dim: 16, depth: 2}
optim: {kind: adam, lr: 0.02}
averaging: {kind: always}
train: {steps: 200, log_every: 10, eval_every: 40, checkpoint_every: 25, keep: 2}
"""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register_task(BagTask)
    yield
    del task._TASKS[BagTask.name]


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "bags.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def run(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> BagRun:
    torch.set_num_threads(1)  # other numbers of threads add in another order
    return train(recipe_file, out=tmp_path_factory.mktemp("runs") / "whole", device="cpu")


class StopAt(Reporter):
    """Asks the run to stop at a step, as Ctrl-C would."""

    def trained(self, record: dict) -> None:
        if record["step"] == 90:
            os.kill(os.getpid(), signal.SIGINT)


def test_it_learns_and_is_loaded_again(run: BagRun) -> None:
    assert run.result["test_right"] > 0.9
    assert run.result["settings"]["data"]["length"] == 6
    loaded = load_run(run.folder.path, device="cpu")
    assert isinstance(loaded, BagRun)
    assert loaded.measure("test").facts["right"] == run.result["test_right"]
    assert loaded.count([1, 3, 5, 2, 4, 6]) == 3
    assert "parameters, test perplexity" in repr(loaded)


def test_a_stopped_run_goes_on_to_the_same_weights(run: BagRun, recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="Stopped at step 90"):
        train(recipe_file, out=tmp_path / "run", device="cpu", reporter=StopAt())
    resumed = train(out=tmp_path / "run", device="cpu", resume=True)
    assert_same(run, resumed)


def test_a_killed_run_goes_on_to_the_same_weights(run: BagRun, recipe_file: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; import tests.tasks.test_toy_task as toy\n"
        "class Kill(toy.Reporter):\n"
        "    def trained(self, record):\n"
        "        if record['step'] == 110: os.kill(os.getpid(), signal.SIGKILL)\n"
        "toy.register_task(toy.BagTask)\n"
        "toy.train(sys.argv[1], out=sys.argv[2], device='cpu', reporter=Kill())"
    )
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}  # as many threads as here
    killed = subprocess.run([sys.executable, "-c", script, str(recipe_file), str(tmp_path / "run")], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "result.json").exists()
    assert_same(run, train(out=tmp_path / "run", device="cpu", resume=True))


def assert_same(run: BagRun, other: BagRun) -> None:
    for file in ("last", "best"):
        one, two = (read_checkpoint(getattr(r.folder, file)).tensors for r in (run, other))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert [r["loss"] for r in other.result["curve"]] == [r["loss"] for r in run.result["curve"]]
    assert [r["loss"] for r in other.result["train_curve"]] == [r["loss"] for r in run.result["train_curve"]]
    assert other.result["test_right"] == run.result["test_right"]


def test_the_commands_serve_it(run: BagRun, recipe_file: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other"
    shown = printed(capsys, "train", recipe_file, "--out", other, "--data.bags", 100, "--device", "cpu")
    assert "are right" in shown
    assert (
        printed(capsys, "eval", other, "--device", "cpu") == f"{load_run(other).result['test_right']:.1%} are right\n"
    )
    assert "right" in json.loads(printed(capsys, "eval", run.folder, "--split", "valid", "--json"))
    assert json.loads(printed(capsys, "params", other, "--json"))["counts"] == run.result["parameters"]
    assert json.loads(printed(capsys, "params", recipe_file, "--data.tokens", 50, "--json"))["vocabulary_size"] == 50
    assert "--data.bags" in printed(capsys, "train", "--help")
    assert "  bags: 300" in printed(capsys, "recipes", recipe_file).replace("#", " ")
    assert json.loads(printed(capsys, "average", run.folder, "--json"))["averaged_steps"] == [160, 200]
    assert load_run(run.folder.path, checkpoint="average").measure().facts["right"] > 0.7
    printed(capsys, "cache", run.folder)
    assert load_run(run.folder.path, cached=True).measure().facts["right"] == run.result["test_right"]
    compared = json.loads(printed(capsys, "compare", run.folder, other, "--json"))
    assert [one["test_right"] for one in compared["runs"]] == [
        load_run(r).result["test_right"] for r in (run.folder.path, other)
    ]
    assert any("trained on different texts" in warning for warning in compared["warnings"])
    assert "right" in printed(capsys, "compare", run.folder, other).splitlines()[0].split()
    pytest.importorskip("matplotlib")
    printed(capsys, "report", run.folder, other, "--out", tmp_path / "report.html")
    assert "data.bags" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_it_cannot_do_is_refused(run: BagRun, recipe_file: Path, capsys) -> None:
    for arguments, message in (
        (("generate", run.folder), "is a model for bags, which has no `generate`"),
        (("translate", run.folder), "is a model for bags, which has no `translate`"),
        (("export", run.folder, "--format", "onnx", "--out", "exported"), "A model for bags cannot be exported."),
        (("eval", run.folder, "--length", 7), "--length means nothing to a model for bags"),
        (("encode", recipe_file, "--out", "tokens"), "The data of the task bags cannot be encoded beforehand"),
        (("train", recipe_file, "--data", "texts"), "The setting 'data.corpus' is unknown"),
        (("train", recipe_file, "--context.layers", 2), "context"),
    ):
        assert message in printed(capsys, *arguments, fails=2)
    with pytest.raises(UserError, match="The task 'bags' is registered already"):
        register_task(BagTask)
    with pytest.raises(UserError, match=r"data\.bags is 0"):
        load_recipe(recipe_file, {"data": {"bags": 0}})


def test_no_other_room_names_a_task() -> None:
    package = Path(task.__file__).parent
    names = "|".join(file.parent.name for file in package.glob("tasks/*/__init__.py"))
    asks = rf"tasks\.({names})\b|[\"\']({names})[\"\'](?!:)|\.task [!=]= |isinstance\([^)]*(Translator|LanguageModel)"
    assert names.count("|") >= 1
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] != "tasks":
            assert re.search(asks, path.read_text(encoding="utf-8")) is None, path
