"""Whole runs whose output is tied to the finished vectors: trained, resumed, cached, packed, exported."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torchdefine import load_run, train
from torchdefine.embedding import table
from torchdefine.export import load_export
from torchdefine.run import RunFolder
from torchdefine.tasks.language import NeuralCache
from torchdefine.training import Interrupted
from torchdefine.training.loop import Trainer
from torchdefine.training.progress import Reporter

FINISHED = {"output": {"tied": "finished"}, "unit": {"embedding_dim": 24}}
STEPS = {"steps": 24, "eval_every": 8, "checkpoint_every": 5, "log_every": 4, "accumulate": 2}


class StopAt(Reporter):
    def __init__(self, step: int) -> None:
        self.step = step

    def trained(self, record: dict) -> None:
        if record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def run_folder(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("finished") / "run"
    train(recipe_file, out=out, train=STEPS, **FINISHED)
    return out


def test_an_interrupted_run_goes_on_to_the_same_numbers(run_folder: Path, recipe_file: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path / "run", train=STEPS, reporter=StopAt(12), **FINISHED)
    train(recipe_file, out=tmp_path / "run", resume=True, train=STEPS, **FINISHED)
    one, other = (load_file(folder / "last" / "checkpoint.safetensors") for folder in (run_folder, tmp_path / "run"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one if name.startswith(("model.", "optimizer.")))
    logs = [[(r["step"], r["loss"]) for r in RunFolder(f).records("train")] for f in (run_folder, tmp_path / "run")]
    assert logs[0] == logs[1]


def test_a_trained_model_evaluates_to_its_validation_in_training(run_folder: Path) -> None:
    """Each of which had the weights of that step, also in the output."""
    curve = RunFolder(run_folder).records("valid")
    assert [point["step"] for point in curve] == [8, 16, 24]
    run = load_run(run_folder, checkpoint="last")
    assert run.evaluate("valid").perplexity == pytest.approx(curve[-1]["perplexity"], rel=1e-6)
    assert run.result["valid_perplexity"] < run.result["valid_unigram_perplexity"]


def test_the_parts_are_counted_once(run_folder: Path) -> None:
    model = load_run(run_folder).model
    assert model.context.output_dim == model.output.hidden_dim == 24
    assert not any("unit" in name or "map" in name for name in model.output.state_dict())
    counts = model.parameters_by_part()
    assert counts["define"] == sum(p.numel() for p in model.embedding.unit.parameters())
    own = (*model.embedding.map.parameters(), *model.output.parameters())
    assert counts["input_output"] == sum(p.numel() for p in own)


def test_cached_vectors_serve_input_and_output(run_folder: Path) -> None:
    load_run(run_folder).cache()
    live, cached = load_run(run_folder), load_run(run_folder, cached=True)
    cached.model.embedding.unit.forward = None  # whoever calls it now fails
    assert cached.evaluate("test").perplexity == pytest.approx(live.evaluate("test").perplexity, rel=1e-6)
    assert cached.generate("w1", 12, seed=3) == live.generate("w1", 12, seed=3)
    neural = NeuralCache(window=20, theta=0.5, weight=0.2)
    found, expected = (run.evaluate("test", cache=neural).perplexity for run in (cached, live))
    assert found == pytest.approx(expected, rel=1e-6)


def test_packed_vectors_serve_input_and_output(run_folder: Path) -> None:
    load_run(run_folder).compress("bits", "2KB")
    packed, live = load_run(run_folder, compressed=True), load_run(run_folder)
    table = packed.model.embedding.looked_up(torch.arange(len(packed.tokenization)))
    rounded = live.evaluate("test").perplexity
    live.model.embedding.look_up(table.detach())
    assert packed.evaluate("test").perplexity == pytest.approx(live.evaluate("test").perplexity, rel=1e-6)
    assert packed.evaluate("test").perplexity != rounded


@pytest.mark.parametrize("how", [{}, pytest.param({"compressed": True}, marks=pytest.mark.slow)])
def test_exported_programs_give_what_the_model_gives(run_folder: Path, tmp_path: Path, how: dict[str, bool]) -> None:
    load_run(run_folder).compress("bits", "2KB")
    run = load_run(run_folder, **how)
    looked_up = run.model.embedding.looked_up
    run.export(tmp_path / "export")  # every program is compared with a model that looks its vectors up
    assert run.model.embedding.looked_up is looked_up
    step = load_export(tmp_path / "export").programs["step"]
    zeros = {port.name: torch.zeros(port.sized({"batch": 2})) for port in step.inputs[1:]}
    ids = torch.tensor([[3], [5]])
    with torch.no_grad():
        expected, _ = run.model.step(ids, run.model.initial_state(2))
    torch.testing.assert_close(step(ids=ids, **zeros)["log_probs"], expected, rtol=1e-5, atol=1e-5)


def test_a_translator(translation_recipe: Path, tmp_path: Path) -> None:
    run = train(translation_recipe, out=tmp_path / "run", train={"steps": 20, "keep": 0}, output={"tied": "finished"})
    output, target = run.model.output, run.model.target
    assert output.projection is None
    with torch.no_grad():
        assert output.weight is target.finished()
    loaded = load_run(tmp_path / "run")
    lines = ["one two red house."]
    assert loaded.translate(lines) == run.translate(lines)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["parameters"]["define"] > 0
    run.cache()
    cached = load_run(tmp_path / "run", cached=True)
    cached.model.target.unit.forward = None
    assert [best.text for [best] in cached.translate(lines)] == [best.text for [best] in run.translate(lines)]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("output", [{"kind": "full", "bias": False}, {"kind": "adaptive"}])
def test_recorded_steps_on_a_gpu(
    recipe_file: Path, tmp_path: Path, precision: str, output: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several parts that are computed again, with dropout in the unit: the same numbers, and never a wait."""
    monkeypatch.setattr(table, "TOKENS_AT_ONCE", 16)
    original = Trainer._train_step

    def watched(self: Trainer) -> None:
        torch.cuda.set_sync_debug_mode("error" if self.position.step > 2 else "default")
        try:
            original(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "_train_step", watched)
    losses = {}
    for recorded in (False, True):
        out = tmp_path / str(recorded)
        settings = {**STEPS, "precision": precision, "cuda_graphs": recorded, "log_every": 1}
        run = train(recipe_file, out=out, train=settings, **{**FINISHED, "output": {"tied": "finished", **output}})
        losses[recorded] = [record["loss"] for record in run.folder.records("train")]
        last = load_run(out, checkpoint="last")
        validated = RunFolder(out).records("valid")[-1]["perplexity"]
        assert last.evaluate("valid").perplexity == pytest.approx(validated, rel=1e-4)
    assert losses[True] == pytest.approx(losses[False], rel=1e-3 if precision == "fp32" else 2e-2)
