"""The loop through its public face: runs that end, break off, go on, and fail."""

import copy
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from torchdefine import load_run, register_output, train
from torchdefine.errors import MachineError, UserError
from torchdefine.output import OUTPUTS, OutputConfig, OutputLayer
from torchdefine.run import RunFolder
from torchdefine.training import Interrupted
from torchdefine.training.evaluation import perplexity
from torchdefine.training.loop import stop_requests
from torchdefine.training.precision import Precision
from torchdefine.training.progress import Reporter
from torchdefine.training.schedules import ConstantConfig
from torchdefine.training.step import Batch, TrainingStep

GOLDEN_LOSSES = Path(__file__).parent / "golden_losses.json"
with_the_golden_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="other versions of torch draw and round otherwise"
)


def weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    tensors = load_file(folder / which / "checkpoint.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("model.", "optimizer."))}


def assert_same_run(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (one, other))
    for key in ("valid_perplexity", "test_perplexity", "steps", "tokens", "best_step"):
        assert first[key] == second[key], key
    losses = [[(r["step"], r["loss"]) for r in RunFolder(f).records("train")] for f in (one, other)]
    assert losses[0] == losses[1]


class StopAt(Reporter):
    """Sends this process a signal when a log line of a step comes."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def trained(self, record: dict) -> None:
        if record["step"] >= self.step:
            self.step = 10**9
            os.kill(os.getpid(), self.number)


@pytest.fixture(scope="module")
def unbroken(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    train(recipe_file, out=out)
    return out


def test_a_run_leaves_all_its_files_and_learns(unbroken: Path) -> None:
    names = sorted(p.name for p in unbroken.iterdir())
    assert names == ["best", "config.yaml", "last", "log.jsonl", "result.json", "vocab.txt"]
    result = json.loads((unbroken / "result.json").read_text())
    for key in ("recipe", "overrides", "seed", "commit", "hardware", "versions", "parameters", "curve", "data"):
        assert key in result, key
    assert result["steps"] == 60
    assert result["test_perplexity"] < 0.95 * result["test_unigram_perplexity"]
    assert [p["step"] for p in result["curve"]] == [25, 50, 60]
    logged = {"step", "tokens", "seconds", "loss", "lr", "gradient_norm"}
    assert all(point.keys() == logged for point in result["train_curve"])
    assert len(result["data"]["splits"]["train"]["text_sha256"]) == 64
    assert result["tokens"] == 60 * 40 - sum(40 - n for n in short_segments(unbroken, 60))


def short_segments(folder: Path, steps: int) -> list[int]:
    tokens = json.loads((folder / "result.json").read_text())["data"]["splits"]["train"]["tokens"] // 4
    segments, rest = tokens // 10, tokens % 10
    return [rest * 4] * (steps // (segments + 1)) if rest else []


@with_the_golden_torch
def test_golden_losses(unbroken: Path) -> None:
    """A change that is not meant to change numbers leaves these as they are."""
    losses = {str(r["step"]): r["loss"] for r in RunFolder(unbroken).records("train")}
    expected = json.loads(GOLDEN_LOSSES.read_text())
    assert losses.keys() == expected.keys()
    for step, loss in expected.items():
        assert losses[step] == pytest.approx(loss, rel=2e-4), step


def test_same_seed_same_numbers_other_seed_others(unbroken: Path, recipe_file: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    train(recipe_file, out=tmp_path / "same")
    assert_same_run(unbroken, tmp_path / "same")
    train(recipe_file, out=tmp_path / "other", train={"seed": 2})
    assert (
        weights(tmp_path / "other")["model.output.cluster_weight"]
        .ne(weights(unbroken)["model.output.cluster_weight"])
        .any()
    )


@pytest.mark.parametrize(("step", "number"), [(14, signal.SIGINT), (35, signal.SIGTERM)])
def test_a_polite_stop_saves_and_resumes_to_the_same_numbers(
    unbroken: Path, recipe_file: Path, tmp_path: Path, step: int, number: int
) -> None:
    torch.set_num_threads(1)
    out = tmp_path / "run"
    with pytest.raises(Interrupted, match=f"Stopped at step {step}; continue the run in .* with resume"):
        train(recipe_file, out=out, reporter=StopAt(step, number))
    assert not (out / "result.json").exists()
    train(recipe_file, out=out, resume=True)
    assert_same_run(unbroken, out)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the loop sees, in which every step takes a second and nothing else any."""
    seconds, whole_step = [0.0], TrainingStep.__call__

    def a_second(step: TrainingStep, *arguments: Any) -> None:
        whole_step(step, *arguments)
        seconds[0] += 1

    monkeypatch.setattr(TrainingStep, "__call__", a_second)
    monkeypatch.setattr("torchdefine.training.loop.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


@pytest.mark.usefixtures("now")
def test_a_stop_between_two_log_lines_loses_no_training_time(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_step = TrainingStep.__call__

    def stopped(step: TrainingStep, *arguments: Any) -> None:
        timed_step(step, *arguments)
        if int(step.steps_done) == 17:  # three steps after a log line
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainingStep, "__call__", stopped)
    with pytest.raises(Interrupted, match="Stopped at step 17"):
        train(recipe_file, out=tmp_path / "run")
    result = train(recipe_file, out=tmp_path / "run", resume=True).result
    assert result["seconds"] == 60
    assert result["tokens_per_second"] == round(result["tokens"] / 60, 1)


def test_validation_is_no_training_time_and_every_log_line_has_its_own_speed(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    def ten_seconds() -> SimpleNamespace:
        now[0] += 10
        return SimpleNamespace(loss=1.0, perplexity=math.e)

    monkeypatch.setattr("torchdefine.tasks.language.task.LanguageTask.validation", lambda *_: ten_seconds)
    result = train(recipe_file, out=tmp_path, train={"steps": 12, "log_every": 3, "eval_every": 4}).result
    assert result["seconds"] == 12 + 2 * 10  # the last validation comes after the last step
    assert result["tokens_per_second"] == result["tokens"] / 12
    assert [r["tokens_per_second"] for r in RunFolder(tmp_path).records("train")] == [4 * 10] * 4


def test_a_stop_asked_for_at_the_last_step_comes_too_late(recipe_file: Path, tmp_path: Path) -> None:
    run = train(recipe_file, out=tmp_path, reporter=StopAt(5, signal.SIGTERM), train={"steps": 5})
    assert run.result["steps"] == 5


def kill_at_random_then_resume(recipe_file: Path, out: Path, seconds: float) -> int:
    """Kill -9 a training process some time after its first checkpoint; returns the step it had reached.

    Every step takes a hundredth of a second more, so that on a fast machine, too, the run lasts as long as the waiting.
    """
    code = """
import sys, time, torch, torchdefine
from torchdefine.training.step import TrainingStep

step = TrainingStep.__call__
TrainingStep.__call__ = lambda *given: (time.sleep(0.01), step(*given))[1]
torch.set_num_threads(1)
torchdefine.train(sys.argv[1], out=sys.argv[2])
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(recipe_file), str(out)], stderr=subprocess.DEVNULL)
    folder = RunFolder(out)
    while not folder.last.exists() and process.poll() is None:
        time.sleep(0.002)
    time.sleep(seconds)
    process.kill()
    process.wait()
    records = folder.records("train")
    train(recipe_file, out=out, resume=True)
    return records[-1]["step"] if records else 0


@pytest.mark.parametrize("seconds", [0.05, 0.3])
def test_kill_9_and_resume_gives_the_same_bits(
    unbroken: Path, recipe_file: Path, tmp_path: Path, seconds: float
) -> None:
    torch.set_num_threads(1)
    kill_at_random_then_resume(recipe_file, tmp_path / "run", seconds)
    assert_same_run(unbroken, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*tmp*"))


def test_a_run_that_broke_off_before_its_first_checkpoint_begins_again(
    unbroken: Path, recipe_file: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(recipe_file, out=out, reporter=StopAt(7, signal.SIGTERM))
    shutil.rmtree(out / "last")
    train(recipe_file, out=out, resume=True)
    assert_same_run(unbroken, out)


@pytest.mark.slow
def test_kill_9_at_twenty_random_points(unbroken: Path, recipe_file: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    clock = random.Random(0)
    reached = set()
    for attempt in range(20):
        out = tmp_path / f"run-{attempt}"
        reached.add(kill_at_random_then_resume(recipe_file, out, clock.uniform(0, 0.6)))
        assert_same_run(unbroken, out)
    assert len(reached) > 3  # the points were spread over the run


def test_accumulation_gives_the_same_gradients(recipe_file: Path, tmp_path: Path) -> None:
    still = {
        "embedding": {"row_dropout": 0.0},
        "unit": {"dropout": 0.0},
        "context": {"input_dropout": 0.0, "hidden_dropout": 0.0},
        "loss": {"output_dropout": 0.0},
        "optim": {"kind": "sgd", "lr": 0.5, "clip": 1.0},
    }
    for parts in (1, 4):
        train(recipe_file, out=tmp_path / str(parts), train={"accumulate": parts, "steps": 30}, **still)
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(one[name], four[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("kind", ["constant", "drops", "cosine", "plateau"])
def test_optimisers_and_schedules_resume(recipe_file: Path, tmp_path: Path, optimizer: str, kind: str) -> None:
    torch.set_num_threads(1)
    own = {"drops": {"drops": [12], "factor": 2}, "plateau": {"factor": 2}}
    settings = {
        "optim": {"kind": optimizer, "lr": 0.01, "clip": 1.0, **({"momentum": 0.9} if optimizer == "sgd" else {})},
        "schedule": {"kind": kind, "warmup": 3, **own.get(kind, {})},
        "train": {"steps": 24, "log_every": 4, "eval_every": 6},
    }
    train(recipe_file, out=tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path / "broken", reporter=StopAt(12, signal.SIGTERM), **settings)
    train(recipe_file, out=tmp_path / "broken", resume=True, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_the_rate_goes_with_the_length_where_lengths_are_random(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    plain = TrainingStep.__call__

    def watched(self: TrainingStep, batch: Batch, rate: float) -> None:
        steps.append((batch.parts[0].inputs[0].shape[1], rate))
        plain(self, batch, rate)

    monkeypatch.setattr(TrainingStep, "__call__", watched)
    run = train(recipe_file, out=tmp_path, train={"steps": 30, "random_length": True, "length": 20}, optim={"lr": 0.01})
    assert run.result["steps"] == len(steps) == 30
    assert len({length for length, _ in steps}) > 3
    assert [rate for _, rate in steps] == pytest.approx([0.01 * length / 20 for length, _ in steps])


def test_drops_of_a_run_by_epochs_come_after_epochs(recipe_file: Path, tmp_path: Path) -> None:
    drops = {"kind": "drops", "drops": [1], "factor": 10}
    short = {"epochs": 2, "batch_size": 40, "length": 20, "log_every": 1}
    run = train(recipe_file, out=tmp_path, optim={"lr": 0.01}, schedule=drops, train=short)
    found = [(record["lr"], record["epoch"] > 1) for record in run.folder.records("train")]
    half = len(found) // 2
    assert found == [(0.01, False)] * half + [(pytest.approx(0.001), True)] * half


def test_the_rate_drops_and_the_best_weights_are_kept_by_validation(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [800, 4, 4, 4.5, 4.2, 3, 3, 3.5]  # e⁸⁰⁰ is no number, so it is no best perplexity
    found = iter([SimpleNamespace(loss=loss, perplexity=perplexity(loss)) for loss in losses])
    monkeypatch.setattr("torchdefine.tasks.language.task.LanguageTask.validation", lambda *_: lambda: next(found))
    out = tmp_path / "run"
    run = train(
        recipe_file, out=out, optim={"lr": 0.01}, train={"steps": 16, "log_every": 2, "eval_every": 2},
        schedule={"kind": "plateau", "patience": 1, "factor": 2},
    )  # fmt: skip
    rates = [record["lr"] for record in RunFolder(out).records("train")]
    assert rates == pytest.approx([0.01] * 4 + [0.005] * 4), "after two that are not better, and once for them"
    validated = RunFolder(out).records("valid")
    assert [record["step"] for record in validated if record["best"]] == [4, 12]
    assert json.loads((out / "result.json").read_text())["best_step"] == 12
    best, last = (load_run(out, checkpoint=which).evaluate("test").loss for which in ("best", "last"))
    assert best != pytest.approx(last, rel=1e-3)
    assert [run.evaluate("test").loss, run.result["evaluation"]["test"]["loss"]] == pytest.approx([best] * 2, rel=1e-6)
    assert run.weights == run.folder.best


@pytest.mark.parametrize("seen", [24, 25, 30])  # by the next log line, validation or checkpoint
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: int
) -> None:
    original = ConstantConfig.ratio

    def spoilt(self: ConstantConfig, step: int, *others: Any) -> float:
        return math.inf if step == seen - 2 else original(self, step, *others)

    monkeypatch.setattr(ConstantConfig, "ratio", spoilt)
    with pytest.raises(MachineError) as caught:
        train(recipe_file, out=tmp_path, optim={"kind": "sgd", "lr": 0.5, "clip": 1.0})
    message = str(caught.value)
    assert (
        f"stopped being finite at step {seen} (10 tokens from token {10 * (seen - 1)} of every stream)" in message
    )  # the step before spoils the weights, this one shows it
    assert "The last checkpoint is from before that" in message
    assert "in a new run, try a smaller optim.lr" in message
    kept = weights(tmp_path)
    assert all(tensor.isfinite().all() for tensor in kept.values())
    assert all(math.isfinite(record["loss"]) for record in RunFolder(tmp_path).records("valid"))
    assert json.loads(safe_open(RunFolder(tmp_path).last, "pt").metadata()["facts"])["position"]["step"] == 20
    with pytest.raises(MachineError) as again:  # a run that goes on from there says the same
        train(recipe_file, out=tmp_path, optim={"kind": "sgd", "lr": 0.5, "clip": 1.0}, resume=True)
    assert str(again.value) == message


def test_a_loss_scale_that_collapses_blames_no_batch(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Precision, "scale_collapsed", lambda self: True)
    with pytest.raises(MachineError, match=r"The loss scale of fp16 collapsed by step \d+\. No checkpoint"):
        train(recipe_file, out=tmp_path, optim={"kind": "sgd", "lr": 0.5, "clip": 1.0})


@dataclass(frozen=True)
class DecoderConfig(OutputConfig):
    """The settings of somebody else's output layer."""

    kind: str = "decoder"

    def build(self, hidden_dim: int, embedding: Any, vocabulary: Any) -> "Decoder":
        return Decoder(hidden_dim, embedding.map.table.weight)


class Decoder(OutputLayer):
    """An output layer as somebody else would write it: the embedding's table under a name of its own."""

    def __init__(self, hidden_dim: int, table: nn.Parameter) -> None:
        super().__init__(hidden_dim)
        self.dec = nn.Linear(hidden_dim, len(table))
        self.dec.weight = table

    @property
    def num_embeddings(self) -> int:
        return self.dec.out_features

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, *, hint: object = None, **how: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.dec(hidden).flatten(0, -2), targets.flatten(), **how)

    def log_prob(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dec(hidden).log_softmax(-1)

    def resize(self, num_embeddings: int) -> None:
        raise NotImplementedError


def test_a_parameter_with_two_names_is_trained_saved_loaded_and_resumed(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(OUTPUTS, "_kinds", copy.copy(OUTPUTS._kinds))
    register_output(DecoderConfig)
    changes: dict[str, Any] = {
        "embedding": {"kind": "standard", "map_dim": 16},
        "unit": "none",
        "context": {"output_dim": 16},
        "output": {"kind": "decoder"},
        "train": {"steps": 12, "log_every": 3, "eval_every": 6, "checkpoint_every": 4},
    }
    run = train(recipe_file, out=tmp_path / "whole", **changes)
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path / "run", reporter=StopAt(5, signal.SIGTERM), **changes)
    train(recipe_file, out=tmp_path / "run", resume=True, **changes)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    saved = weights(tmp_path / "run")
    assert torch.equal(saved["model.embedding.map.table.weight"], saved["model.output.dec.weight"])
    model = load_run(tmp_path / "run", checkpoint="last").model
    assert model.output.dec.weight is model.embedding.map.table.weight
    assert torch.equal(model.output.dec.weight, saved["model.output.dec.weight"])
    assert run.evaluate("test").perplexity == pytest.approx(run.result["test_perplexity"], rel=1e-6)


def test_existing_runs_are_never_overwritten(unbroken: Path, recipe_file: Path) -> None:
    before = (unbroken / "result.json").read_bytes()
    with pytest.raises(UserError, match="holds a run already: go on with it by resume"):
        train(recipe_file, out=unbroken)
    with pytest.raises(UserError, match=r"started with another optim\.lr"):
        train(recipe_file, out=unbroken, resume=True, optim={"lr": 1.0})
    finished = train(recipe_file, out=unbroken, resume=True)
    assert finished.result["steps"] == 60
    assert (unbroken / "result.json").read_bytes() == before


def test_a_refused_run_leaves_nothing_behind(recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for changes in (
        {"train": {"batch_size": 100_000}},
        {"context": {"kind": "nothing"}},
        {"embedding": {"cutoffs": [900, 1000]}},
        {"context": {"input_dropout": 1.5}},
    ):
        with pytest.raises(UserError):
            train(recipe_file, out=out, **changes)
        assert not out.exists()
    out.mkdir()
    (out / "vocab.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds vocab\.txt already"):
        train(recipe_file, out=out)
    assert (out / "vocab.txt").read_text() == "mine"


KILLED_AT_A_FILE = """
import os, signal, sys
from torchdefine import train
recipe, out, fatal = sys.argv[1:]
replace = os.replace
def replace_or_die(source, target):
    if os.path.basename(target) == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = replace_or_die
train(recipe, out=out)
"""


@pytest.mark.parametrize(("fatal", "resume"), [("config.yaml", False), ("vocab.txt", True)])
def test_a_run_that_is_killed_while_it_is_made_can_go_on(
    recipe_file: Path, tmp_path: Path, fatal: str, resume: bool
) -> None:
    out = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_A_FILE, recipe_file, out, fatal], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert any(out.iterdir())
    train(None if resume else recipe_file, out=out, resume=resume)
    assert load_run(out).result["steps"] == 60
    assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("schedule.kind plateau", {"schedule": {"kind": "plateau"}}),
        ("averaging.kind stalled", {"averaging": "stalled"}),
        ("train.early_stopping", {"train": {"early_stopping": 5}}),
        ("train.keep", {"train": {"keep": 2}}),
    ],
)
def test_what_goes_by_validation_needs_a_validation_text(
    recipe_file: Path, corpus: Path, tmp_path: Path, setting: str, changes: dict
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    shutil.copy(corpus / "train.txt", text)
    with pytest.raises(UserError, match=f"{setting} needs validations, but there is no validation text"):
        train(recipe_file, data=text, out=tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_train_in_one_folder(recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunFolder(out).locked(), pytest.raises(UserError, match="Another process is training in"):
        train(recipe_file, out=out)
    assert train(recipe_file, out=out, train={"steps": 5}).result["steps"] == 5


def test_a_second_signal_in_the_handler_of_the_first_does_no_harm() -> None:
    def ask_twice() -> None:
        with stop_requests() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            while not asked():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            ask_twice()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_damaged_log_does_not_stop_a_run(unbroken: Path, recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(recipe_file, out=out, reporter=StopAt(14, signal.SIGTERM))
    with (out / "log.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n5\n{"kind": "train"}\n{"kind": "train", "step": "x"}\n{"kind"')
    train(recipe_file, out=out, resume=True)
    assert [r["step"] for r in RunFolder(out).records("train")] == [
        r["step"] for r in RunFolder(unbroken).records("train")
    ]


def test_loaded_run_evaluates_to_its_result(unbroken: Path) -> None:
    run = load_run(unbroken)
    assert run.evaluate("test").perplexity == pytest.approx(run.result["test_perplexity"], rel=1e-6)
    short = run.evaluate("valid", length=3)
    assert short.perplexity == pytest.approx(run.result["valid_perplexity"], rel=1e-5)
    assert "segments of 3 tokens" in short.protocol
    text = run.generate("w1 w2", 10, seed=1)
    assert "<unk>" not in text
    assert text == run.generate("w1 w2", 10, seed=1)


def test_a_run_is_ready_for_use_whether_it_was_trained_now_or_before(recipe_file: Path, tmp_path: Path) -> None:
    run = train(recipe_file, out=tmp_path / "run", train={"steps": 3})
    again = train(recipe_file, out=tmp_path / "run", train={"steps": 3}, resume=True)
    ids = torch.arange(40).view(2, 20)
    first, second = (r.model.log_prob(ids, r.model.initial_state(2))[0] for r in (run, again))
    assert torch.equal(first, second)  # in training, dropout would make them differ
    assert not any(part.training for part in run.model.modules())


def test_another_vocabulary_or_a_cut_checkpoint_is_refused(unbroken: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unbroken, copy)
    words = (copy / "vocab.txt").read_text().splitlines()
    words[1], words[2] = words[2], words[1]
    (copy / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(UserError, match="was trained with another vocabulary"):
        load_run(copy)
    shutil.copy(unbroken / "vocab.txt", copy / "vocab.txt")
    best = copy / "best" / "checkpoint.safetensors"
    best.write_bytes(best.read_bytes()[:-1000])
    with pytest.raises(UserError, match="damaged or cut short"):
        load_run(copy)
    assert load_run(copy, checkpoint="last").model is not None
    whole = bytearray((unbroken / "best" / "checkpoint.safetensors").read_bytes())
    whole[-1001] ^= 1  # in the middle of a tensor
    best.write_bytes(whole)
    with pytest.raises(UserError, match="is not what was written"):
        load_run(copy)
    save_file(load_file(copy / "last" / "checkpoint.safetensors"), best, metadata={"format_version": "2"})
    with pytest.raises(UserError, match="has format version 2; this torchdefine reads version 1"):
        load_run(copy)
    with pytest.raises(UserError, match="holds no run"):
        load_run(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_training_step_never_waits_for_the_gpu(
    recipe_file: Path, tmp_path: Path, precision: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchdefine.training.loop import Trainer

    original = Trainer._train_step

    def watched(self: Trainer) -> None:
        watching = self.position.step > 2
        torch.cuda.set_sync_debug_mode("error" if watching else "default")
        try:
            original(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "_train_step", watched)
    run = train(
        recipe_file,
        out=tmp_path / "run",
        train={"precision": precision},
        optim={"kind": optimizer, "lr": 0.01, "clip": 1.0},
    )
    assert run.result["precision"] == precision
    assert run.result["hardware"]["device"] == "cuda"


@pytest.mark.gpu
def test_resume_on_the_gpu_in_half_precision(recipe_file: Path, tmp_path: Path) -> None:
    half = {"precision": "fp16"}
    train(recipe_file, out=tmp_path / "whole", train=half)
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path / "broken", train=half, reporter=StopAt(28, signal.SIGTERM))
    run = train(recipe_file, out=tmp_path / "broken", train=half, resume=True)
    whole = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert run.result["valid_perplexity"] == pytest.approx(whole["valid_perplexity"], rel=1e-3)


def test_a_text_that_has_changed_is_not_resumed_on(recipe_file: Path, corpus: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    shutil.copytree(corpus, text)
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(recipe_file, data=text, out=out, reporter=StopAt(14, signal.SIGTERM))
    lines = (text / "train.txt").read_text().splitlines()
    (text / "train.txt").write_text("\n".join([*lines[1:], lines[0]]) + "\n")  # the same words in another order
    with pytest.raises(UserError, match="The training text has changed since"):
        train(recipe_file, data=text, out=out, resume=True)


def test_subwords_end_to_end(recipe_file: Path, corpus: Path, tmp_path: Path) -> None:
    """Ids that are not in frequency order: bands go by counts, and the ranks come back with the weights."""
    from torchdefine.data import train_subwords

    tokenizer = train_subwords([corpus / "train.txt"], 300).save(tmp_path / "bpe.json")
    out = tmp_path / "run"
    run = train(recipe_file, out=out, data={"tokenizer": str(tokenizer)}, train={"steps": 30})
    assert (out / "tokenizer.json").exists()
    loaded = load_run(out)
    assert loaded.model.embedding.map.ranks is not None
    assert torch.equal(loaded.model.embedding.map.ranks, run.model.embedding.map.ranks)
    assert not torch.equal(loaded.model.embedding.map.ranks, torch.arange(len(loaded.tokenization)))
    assert loaded.evaluate("test").perplexity == pytest.approx(run.result["test_perplexity"], rel=1e-6)
    assert run.result["evaluation"]["test"]["bits_per_byte"] > 0
    assert isinstance(loaded.generate("w1", 5, seed=0), str)


def test_a_run_with_a_tokenizer_file_resumes_from_another_folder(
    recipe_file: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchdefine.data import train_subwords

    train_subwords([corpus / "train.txt"], 300).save(tmp_path / "bpe.json")
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"train": {"steps": 20}, "out": tmp_path / "run"}
    with pytest.raises(Interrupted):
        train(recipe_file, data={"tokenizer": "bpe.json"}, reporter=StopAt(7, signal.SIGINT), **settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train(recipe_file, data={"tokenizer": "../bpe.json"}, resume=True, **settings).result["steps"] == 20
    (tmp_path / "run" / "result.json").unlink()
    moved = shutil.move(tmp_path / "bpe.json", tmp_path / "elsewhere")
    run = train(data={"tokenizer": "bpe.json"}, out=tmp_path / "run", resume=True)
    assert run.folder.recipe().data.tokenizer == str(moved)


def test_a_run_whose_settings_have_a_relative_path_still_resumes(
    recipe_file: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of earlier versions have: it means what it meant there, seen from the same folder."""
    from torchdefine.data import train_subwords

    train_subwords([corpus / "train.txt"], 300).save(tmp_path / "bpe.json")
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"data": {"tokenizer": "bpe.json"}, "train": {"steps": 20}, "out": "run"}
    with pytest.raises(Interrupted):
        train(recipe_file, reporter=StopAt(7, signal.SIGINT), **settings)
    config = Path("run/config.yaml")
    config.write_text(re.sub(r"tokenizer: .*bpe\.json", "tokenizer: bpe.json", config.read_text()))
    assert train(recipe_file, resume=True, **settings).result["steps"] == 20
