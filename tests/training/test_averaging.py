import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchdefine import train
from torchdefine.data.tokenizer import train_subwords
from torchdefine.errors import UserError
from torchdefine.training import Interrupted
from torchdefine.training.averaging import WeightAverage, stalled

from .test_loop import StopAt, assert_same_run


def test_stalled_on_histories_made_by_hand() -> None:
    """Worse than the best of all but the last two: a loss that only the last two beat does not count as a stall."""
    assert not stalled([], 5.0, 2)
    assert not stalled([3.0, 1.0], 5.0, 2)  # as many as the patience: nothing is old enough yet
    assert stalled([3.0, 4.0, 5.0], 3.1, 2)
    assert not stalled([3.0, 4.0, 5.0], 3.0, 2)  # equal is not worse
    assert not stalled([5.0, 2.0, 2.5], 4.0, 2)  # the two better ones are too recent
    assert stalled([5.0, 2.0, 2.5, 4.0], 4.0, 2)
    assert stalled([2.0], 2.1, 0)
    history = [10, 9, 8, 7, 6, 5.5, 5.6, 5.4, 5.7, 5.6, 5.5, 5.6]
    first = next(i for i in range(len(history)) if stalled(history[:i], history[i], 5))
    assert first == 11  # the paper's rule, min over the last five, would have come at 8


def test_average_is_a_running_mean_and_leaves_the_weights_alone() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(3, dtype=torch.float64)), "b": nn.Parameter(torch.ones(2, 2).double())}
    average = WeightAverage(parameters)
    assert not average.running
    average.start()
    seen = []
    for _ in range(7):
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(torch.randn_like(parameter))
        seen.append({name: p.detach().clone() for name, p in parameters.items()})
        average.update()
    for name in parameters:
        mean = torch.stack([step[name] for step in seen]).mean(0)
        torch.testing.assert_close(average.tensors()[name], mean)
        with average.in_place():
            torch.testing.assert_close(parameters[name].detach(), mean)
        assert torch.equal(parameters[name], seen[-1][name])


def test_average_equals_torchs_asgd() -> None:
    torch.manual_seed(0)
    target = torch.randn(5, dtype=torch.float64)
    ours, theirs = (nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2))
    sgd = torch.optim.SGD([ours], lr=0.02, weight_decay=0.01)
    asgd = torch.optim.ASGD([theirs], lr=0.02, t0=0, lambd=0.0, weight_decay=0.01)
    average = WeightAverage({"w": ours})
    average.start()
    for step in range(12):
        for parameter, optimizer in ((ours, sgd), (theirs, asgd)):
            optimizer.zero_grad()
            (parameter - target).pow(4).sum().backward()
            optimizer.step()
        if step > 0:  # torch's own average forgets the first step again
            average.update()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(average.tensors()["w"], asgd.state[theirs]["ax"])


AWD = {
    "context": {"recurrent_dropout": 0.2},
    "loss": {"activation_penalty": 2.0, "temporal_penalty": 1.0},
    "optim": {"kind": "sgd", "lr": 4.0, "clip": 1.0},
    "averaging": {"kind": "stalled", "patience": 1},
    "train": {"steps": 120, "eval_every": 6, "log_every": 6, "random_length": True},
}


def test_averaging_starts_when_validation_stalls_helps_and_resumes(recipe_file: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = train(recipe_file, out=tmp_path / "whole", **AWD)
    curve = whole.result["curve"]
    averaged = [point for point in curve if "averaged_steps" in point]
    assert 0 < len(averaged) < len(curve)
    assert averaged[0]["averaged_steps"] == 6
    assert min(p["loss"] for p in averaged) < min(p["loss"] for p in curve if p not in averaged)
    assert whole.evaluate("valid").loss == pytest.approx(min(p["loss"] for p in curve), rel=1e-5)
    stop = averaged[0]["step"] + 3
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path / "broken", reporter=StopAt(stop, signal.SIGTERM), **AWD)
    train(recipe_file, out=tmp_path / "broken", resume=True, **AWD)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize(("stops", "steps"), [(True, 14), (False, 20)])
def test_an_average_stalls_by_its_own_record(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool, steps: int
) -> None:
    losses = [3.0, 2.0, 4.0, 3.5, 3.4, 3.3, 3.6, 3.45, 3.7, 3.8]  # the average starts after the third
    found = iter([SimpleNamespace(loss=loss, perplexity=math.exp(loss)) for loss in losses])
    monkeypatch.setattr("torchdefine.tasks.language.task.LanguageTask.validation", lambda *_: lambda: next(found))
    averaging = {"kind": "stalled", "patience": 1}
    patience = 1 if stops else None
    run = train(
        recipe_file,
        out=tmp_path,
        averaging=averaging,
        train={"steps": 20, "eval_every": 2, "early_stopping": patience},
    )
    assert run.result["steps"] == steps
    assert [point.get("averaged_steps") for point in run.result["curve"]] == [None] * 3 + list(range(2, steps - 5, 2))


def test_fine_tuning_starts_from_a_run_and_ends_when_it_stalls(recipe_file: Path, tmp_path: Path) -> None:
    first = train(recipe_file, out=tmp_path / "first", train={"steps": 40})
    settings = {
        "optim": {"kind": "sgd", "lr": 4.0, "clip": 1.0},
        "averaging": "always",
        "train": {"steps": 3000, "eval_every": 10, "start_from": str(tmp_path / "first"), "early_stopping": 0},
    }
    second = train(recipe_file, out=tmp_path / "second", **settings)
    assert second.result["steps"] < 3000
    assert second.result["valid_perplexity"] < first.result["valid_perplexity"]
    assert second.result["curve"][0]["perplexity"] < 1.3 * first.result["valid_perplexity"]
    again = train(recipe_file, out=tmp_path / "second", resume=True, **settings)
    assert again.result["steps"] == second.result["steps"]


def test_fine_tuning_goes_on_without_the_run_that_it_started_from(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(recipe_file, out=tmp_path / "first", train={"steps": 5})
    settings = {"train": {"steps": 20, "start_from": "first"}}
    whole = train(recipe_file, out=tmp_path / "second", **settings)
    assert whole.recipe.train.start_from == str(tmp_path / "first")  # wherever somebody goes on with it
    (tmp_path / "second" / "result.json").unlink()
    shutil.rmtree(tmp_path / "first")
    again = train(recipe_file, out=tmp_path / "second", resume=True, **settings)
    assert again.result["test_perplexity"] == whole.result["test_perplexity"]


def test_fine_tuning_refuses_what_is_no_run_or_another_vocabulary(
    recipe_file: Path, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="nothing, but there is no such folder"):
        train(recipe_file, out=tmp_path / "run", train={"start_from": str(tmp_path / "nothing")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no best weights: name a run's folder"):
        train(recipe_file, out=tmp_path / "run", train={"start_from": str(tmp_path / "empty")})
    train(recipe_file, out=tmp_path / "first", data={"max_size": 50}, train={"steps": 5})
    start: dict[str, Any] = {"train": {"steps": 5, "start_from": str(tmp_path / "first")}}
    with pytest.raises(UserError, match=r"has another vocabulary: the words .* give both runs one tokenizer by data"):
        train(recipe_file, out=tmp_path / "run", **start)
    assert not (tmp_path / "run").exists()


def test_fine_tuning_shares_a_tokenizer_as_it_is_told(recipe_file: Path, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    train_subwords([corpus / "train.txt"], 270).save(tmp_path / "bpe.json")
    train(recipe_file, out=tmp_path / "first", data={"tokenizer": str(tmp_path / "bpe.json")}, train={"steps": 5})
    start = {"steps": 5, "start_from": str(tmp_path / "first")}
    own = tmp_path / "first" / "tokenizer.json"
    with pytest.raises(UserError, match=f"has another vocabulary: set data.tokenizer to {own}"):
        train(recipe_file, out=tmp_path / "second", train=start)
    train(recipe_file, out=tmp_path / "second", train=start, data={"tokenizer": str(own)})


def test_fine_tuning_names_both_recipes_where_weights_do_not_fit(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, out=tmp_path / "first", train={"steps": 5})
    (other := tmp_path / "wider.yaml").write_text(f"base: {recipe_file}\ncontext: {{hidden_dim: 30, layers: 1}}\n")
    with pytest.raises(UserError) as caught:
        train(other, out=tmp_path / "second", train={"start_from": str(tmp_path / "first")})
    assert f"is a model of {recipe_file}, whose weights do not fit into one of {other}" in str(caught.value)
    assert "(they differ in context.layers, context.hidden_dim): start from" in str(caught.value)
    assert "Size" not in str(caught.value)
