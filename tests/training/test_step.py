import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from torchdefine import StandardMap, train
from torchdefine.context import LSTM, TransformerXL, TransformerXLConfig
from torchdefine.data import TokenStreams
from torchdefine.embedding import TokenEmbedding
from torchdefine.output import FullSoftmax, HostHint
from torchdefine.tasks.language import LanguageLossConfig, LanguageModel, LanguageTrainConfig, TextBatches
from torchdefine.training.cuda_graphs import _without_garbage_collection, flat_tensors, room_for, with_room
from torchdefine.training.precision import Precision
from torchdefine.training.step import Batch, TrainingStep


def test_a_recording_leaves_garbage_collection_as_it_was() -> None:
    for before in (False, True):
        (gc.enable if before else gc.disable)()
        try:
            with _without_garbage_collection():
                assert not gc.isenabled()
            assert gc.isenabled() == before
        finally:
            gc.enable()


def test_room_is_enough_round_and_not_much_more() -> None:
    for count in range(3000):
        room = room_for(count)
        assert room >= count
        assert room <= max(16, 1.5 * count)
    assert len({room_for(count) for count in range(190, 260)}) <= 3


def test_a_hint_gets_room_in_both_of_its_fields() -> None:
    assert with_room(None) is None
    assert with_room(HostHint()) == HostHint()
    assert with_room(HostHint(3, None)) == HostHint(16, None)
    assert with_room(HostHint(None, (17, 0, 300))) == HostHint(None, (24, 16, 384))
    assert with_room(HostHint(300, ())) == HostHint(384, ())


@pytest.mark.parametrize("parts", [1, 2])
def test_a_text_that_is_read_again_begins_without_what_came_at_its_end(parts: int) -> None:
    table = StandardMap(50, 16)
    model = LanguageModel(TokenEmbedding(table), LSTM(16, output_dim=16), FullSoftmax(16, table))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    words = np.random.default_rng(0).integers(0, 50, 8)
    streams = TokenStreams(np.tile(words, 4), 2, "cpu", start_token=int(words[-1]))  # both segments are these words
    data = TextBatches(streams, LanguageTrainConfig(batch_size=2, length=8, epochs=2, accumulate=parts))
    precision = Precision("fp32", torch.device("cpu"))
    step = TrainingStep(model, model, optimizer, precision, [2 // parts] * parts, None, recorded=False)
    losses = []
    for index in range(data.total_steps):
        step.summed_loss.zero_()
        step(data.batch(index), 0.0)
        losses.append(float(step.summed_loss))
    assert losses[2:] == losses[:2]
    assert losses[0] != losses[1], "within the text the state is carried"


def test_random_lengths_are_those_of_the_seed() -> None:
    def lengths(seed: int) -> list[int]:
        settings = LanguageTrainConfig(batch_size=2, length=20, epochs=1, random_length=True, seed=seed)
        data = TextBatches(TokenStreams(np.zeros(400, np.int64), 2, "cpu", start_token=0), settings)
        return [data.batch(step).tokens for step in range(data.total_steps)]

    assert lengths(1) == lengths(1)
    assert lengths(1) != lengths(2)


def test_without_loss_scaling_there_is_nothing_more_to_forget() -> None:
    step, batch = small_step()
    step(batch, 0.1)
    step._forget_recorded()
    assert all(parameter.grad is None for parameter in step.parameters)
    step(batch, 0.1)


def test_a_step_that_broke_off_does_not_hinder_the_next() -> None:
    precision = Precision("fp32", torch.device("cpu"))
    precision.scaler = torch.amp.GradScaler("cpu")
    step, batch = small_step(precision=precision)
    clip, step.clip = step.clip, None  # breaks it off behind the unscaling
    with pytest.raises(TypeError):
        step(batch, 0.1)
    step.clip = clip
    with pytest.raises(RuntimeError, match="already been called"):
        step(batch, 0.1)
    step._forget_recorded()
    step(batch, 0.1)
    assert int(step.steps_done) == 1


def test_a_model_that_was_evaluated_carries_the_state_of_training() -> None:
    model = LanguageModel(
        TokenEmbedding(StandardMap(50, 16)),
        TransformerXL(16, TransformerXLConfig(heads=2, head_dim=8, inner_dim=32, memory=4, eval_memory=6)),
        FullSoftmax(16, num_embeddings=50),
    ).eval()
    parts = (model, model, torch.optim.SGD(model.parameters()), Precision("fp32", torch.device("cpu")))
    step = TrainingStep(*parts, [2], None, recorded=False)
    fresh = model.train().initial_state(2)
    assert [t.shape for t in flat_tensors(step.carried)] == [t.shape for t in flat_tensors(fresh)]


def small_step(
    clip: float | None = None, options: LanguageLossConfig | None = None, precision: Precision | None = None
) -> tuple[TrainingStep, Batch]:
    table = StandardMap(50, 16)
    model = LanguageModel(TokenEmbedding(table), LSTM(16, output_dim=16), FullSoftmax(16, table), options)
    precision = precision or Precision("fp32", torch.device("cpu"))
    parts = (model, model, torch.optim.SGD(model.parameters()), precision)
    streams = TokenStreams(np.arange(32), 2, "cpu", start_token=0)
    data = TextBatches(streams, LanguageTrainConfig(batch_size=2, length=8, epochs=1))
    return TrainingStep(*parts, [2], clip, recorded=False), data.batch(0)


def test_a_step_goes_down_the_whole_objective_and_notes_the_plain_loss() -> None:
    step, batch = small_step(options=LanguageLossConfig(activation_penalty=2.0, temporal_penalty=1.0))
    losses, _ = step.model(*batch.parts[0].inputs, step.model.initial_state(2))
    gradients = torch.autograd.grad(losses.objective, step.parameters)
    expected = [p.detach() - 0.5 * gradient for p, gradient in zip(step.parameters, gradients, strict=True)]
    step(batch, 0.5)
    torch.testing.assert_close([p.detach() for p in step.parameters], expected)
    assert float(step.summed_loss) == pytest.approx(losses.cross_entropy.item())


def test_a_gradient_is_cut_to_the_length_that_was_asked_for() -> None:
    step, batch = small_step(clip=0.01)
    before = [p.detach().clone() for p in step.parameters]
    step(batch, 0.5)
    moved = torch.cat([(old - p).flatten() for old, p in zip(before, step.parameters, strict=True)]).norm()
    assert moved.item() == pytest.approx(0.5 * 0.01, rel=1e-3)
    assert float(step.gradient_norm) > 0.01  # as it was before


def test_a_gradient_that_is_not_finite_is_noted_though_the_loss_is() -> None:
    step, batch = small_step()
    step.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    step(batch, 0.5)
    assert step.summed_loss.isfinite()
    assert int(step.first_bad_step) == 1


def test_of_several_steps_that_are_not_finite_the_first_is_noted() -> None:
    step, batch = small_step()
    step(batch, 0.5)
    assert int(step.first_bad_step) == -1
    step.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    for _ in range(3):
        step(batch, 0.0)
    assert int(step.first_bad_step) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_recorded_steps_give_the_numbers_of_plain_ones(
    recipe_file: Path, tmp_path: Path, precision: str, optimizer: str
) -> None:
    results, weights = [], []
    for record in (False, True):
        out = tmp_path / str(record)
        settings = {"precision": precision, "cuda_graphs": record, "steps": 60, "random_length": True}
        train(
            recipe_file,
            out=out,
            train=settings,
            optim={"kind": optimizer, "lr": 0.01, "clip": 1.0},
            averaging="always",
            context={"recurrent_dropout": 0.3, "state_dropout": 0.2},
            loss={"activation_penalty": 1.0, "temporal_penalty": 1.0},
        )
        results.append(json.loads((out / "result.json").read_text()))
        weights.append(load_file(out / "last" / "checkpoint.safetensors"))
    for plain, recorded in zip(results[0]["train_curve"], results[1]["train_curve"], strict=True):
        assert recorded["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    if optimizer == "sgd":  # Adam blows up float noise in gradients near zero
        for name, tensor in weights[0].items():
            if name.startswith("model."):
                torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_steps_are_really_recorded(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), original(self))[1])
    train(recipe_file, out=tmp_path / "run")
    assert len(replays) > 30


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_cannot_be_recorded_trains_all_the_same(
    precision: str,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = TrainingStep._note

    def asks_the_device(self: TrainingStep, step_loss: torch.Tensor, norm: torch.Tensor) -> None:
        original(self, step_loss, norm + 0 * step_loss.item())

    monkeypatch.setattr(TrainingStep, "_note", asks_the_device)
    losses = []
    for record in (True, False):
        out = tmp_path / str(record)
        settings = {"cuda_graphs": record, "steps": 30, "precision": precision}
        train(recipe_file, out=out, train=settings, context={"recurrent_dropout": 0.3})
        losses.append([line["loss"] for line in json.loads((out / "result.json").read_text())["train_curve"]])
    assert "without CUDA graphs" in caplog.text
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.gpu
def test_runs_one_after_another_are_all_recorded(
    recipe_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(4):  # the graphs of earlier runs are freed at some time, but not while one is being recorded
        train(recipe_file, out=tmp_path / str(index), train={"random_length": True})
    assert "without CUDA graphs" not in caplog.text
