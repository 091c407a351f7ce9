import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.commands import command
from torchdefine import load_run, train
from torchdefine.data import encode_corpus
from torchdefine.errors import UserError
from torchdefine.run import Run
from torchdefine.tasks.language import CachedModel, NeuralCache, evaluate


@pytest.fixture(scope="module")
def run(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(recipe_file, out=tmp_path_factory.mktemp("cache") / "run", train={"steps": 30})


@torch.no_grad()
def brute_force(run: Run, tokens: np.ndarray, cache: NeuralCache) -> float:
    """One token at a time, one remembered position at a time."""
    model = run.model.eval()
    state = model.initial_state(1)
    before = run.tokenization.eos_id
    remembered: list[tuple[torch.Tensor, int]] = []
    nats = 0.0
    for token in tokens.tolist():
        hidden, state = model.hidden(torch.tensor([[before]]), state)
        vector = hidden[0, 0].double()
        p = float(model.output.log_prob(hidden[0, 0].float()).double().exp()[token])
        window = remembered[-cache.window :]
        if window:
            weights = [math.exp(cache.theta * float(vector @ key)) for key, _ in window]
            hit = sum(w for w, (_, word) in zip(weights, window, strict=True) if word == token)
            p = (1 - cache.weight) * p + cache.weight * hit / sum(weights)
        nats -= math.log(p)
        remembered.append((vector, token))
        before = token
    return nats / len(tokens)


@pytest.mark.parametrize("length", [1, 7, 500])
def test_equals_a_loop_over_tokens_whatever_the_segments(run: Run, corpus: Path, length: int) -> None:
    text = encode_corpus(corpus, vocabulary=run.tokenization).splits["valid"]
    cache = NeuralCache(window=25, theta=2.0, weight=0.2)
    result = evaluate(CachedModel(run.model, [cache]), text, run.tokenization.eos_id, length=length, note=f", {cache}")
    assert result.loss == pytest.approx(brute_force(run, np.asarray(text.tokens), cache), rel=1e-5)
    assert "neural cache of 25 positions, theta 2, weight 0.2" in result.protocol


def test_a_weight_of_zero_changes_nothing_and_streams_keep_their_own_memory(run: Run) -> None:
    plain = run.evaluate("valid", batch_size=3)
    assert run.evaluate("valid", batch_size=3, cache=NeuralCache(weight=0.0)).loss == pytest.approx(
        plain.loss, rel=1e-6
    )
    cached = run.evaluate("valid", batch_size=3, cache=NeuralCache(20, 1.0, 0.1))
    assert cached.loss != pytest.approx(plain.loss, rel=1e-6)
    assert cached.protocol == f"{plain.protocol}, {NeuralCache(20, 1.0, 0.1)}"
    assert cached.loss == pytest.approx(
        run.evaluate("valid", batch_size=3, length=5, cache=NeuralCache(20, 1.0, 0.1)).loss
    )


def test_tuning_finds_the_best_of_its_choices_in_one_pass(run: Run, corpus: Path) -> None:
    text = encode_corpus(corpus, vocabulary=run.tokenization).splits["valid"]
    choices = [NeuralCache(w, t, s) for w in (5, 40) for t in (0.0, 1.5) for s in (0.05, 0.3)]
    losses = [run.evaluate("valid", batch_size=2, cache=choice).loss for choice in choices]
    best = run.tune_cache(batch_size=2, choices=choices)
    assert best == choices[int(np.argmin(losses))]
    evaluate(cached := CachedModel(run.model, choices), text, run.tokenization.eos_id, batch_size=2)
    assert (cached.seen.nats / len(text)).tolist() == pytest.approx(losses, rel=1e-6)
    assert run.tune_cache(batch_size=2, choices=choices[:1]) == choices[0]


def test_the_command_tunes_and_evaluates(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.folder.path
    assert command("eval", folder, "--tune-cache", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "Best on the validation text: --neural-cache " in printed
    setting = printed.split("--neural-cache ")[1].split()[0]
    perplexity = printed.split("test perplexity ")[1].split()[0]
    assert command("eval", folder, "--neural-cache", setting, "--device", "cpu") == 0
    assert f"test perplexity {perplexity}" in capsys.readouterr().out
    for given, message in (("500,1", "must be three numbers"), ("0,1,0.1", "neural_cache.window is 0")):
        assert command("eval", folder, "--neural-cache", given) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="weight is 1"):
        NeuralCache(weight=1.0)
    assert load_run(folder).evaluate("test").perplexity > 1


def test_a_cache_is_tuned_under_the_settings_that_it_is_used_with(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdefine.tasks.language.run.evaluate", asked := Mock(wraps=evaluate))
    tuning = ["eval", run.folder.path, "--tune-cache"]
    assert command(*tuning, "--length", "9", "--batch-size", "3", "--device", "cpu") == 0
    tuned, used = asked.call_args_list
    assert tuned.args[1].path.name == "valid.tokens"
    assert [(call.kwargs["length"], call.kwargs["batch_size"]) for call in (tuned, used)] == [(9, 3)] * 2
    asked.reset_mock()
    assert command(*tuning, "--memory", "9", "--device", "cpu") == 2  # an LSTM has no such memory
    assert not asked.called, "what is refused must not be tuned first"
