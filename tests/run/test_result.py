"""What is said of a run that has learned less than it should."""

import json
import math
from pathlib import Path

import pytest

from torchdefine import train
from torchdefine.run import RunFolder
from torchdefine.run.result import shortfall
from torchdefine.training.loop import Diverged
from torchdefine.training.progress import LineReporter


def result(valid: float | None, last: float | None, unigram: float | None = 300.0, loss: float = 7.0) -> dict:
    return {
        **({} if valid is None else {"valid_perplexity": valid}),
        **({} if unigram is None else {"valid_unigram_perplexity": unigram}),
        "data": {"vocabulary_size": 1000},
        "curve": [] if valid is None else [{"perplexity": valid}, {"perplexity": last}],
        "train_curve": [{"loss": 7.0}, {"loss": loss}],
        "best_step": 20,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (result(100.0, 100.0), ""),
        (result(300.0, 1000.0), ""),
        (result(None, None), ""),
        (result(900.0, 900.0, None), ""),
        (result(301.0, 301.0), "A model that only counts words does better, with a perplexity of 300.0 on the valid"),
        (result(1001.0, 1001.0), "The model is worse than uniform guessing among the 1,000 tokens of the vocabulary"),
        (result(100.0, 1e9), "The model became worse than uniform guessing"),
        (result(100.0, math.nan), "and the saved weights are those of step 20: try a smaller optim.lr"),
        (result(100.0, None), "The model became worse than uniform guessing"),
        (result(1001.0, 1e5, loss=0.1), "of the vocabulary, though it overfits the training text: use more text,"),
        (result(1001.0, 1050.0, loss=0.1), "try a smaller optim.lr"),
        (result(100.0, 1e5, loss=0.1), "those of step 20; it overfits the training text: use more text, or fewer"),
        (result(301.0, 900.0, loss=0.1), "the training text: use more text, or fewer steps."),
    ],
)
def test_what_is_said(given: dict, words: str) -> None:
    said = shortfall(given)
    assert words in said
    assert bool(words) == bool(said)


def test_an_infinite_validation_is_never_the_best(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plain = {"embedding": {"kind": "standard", "map_dim": 16}, "unit": "none", "output": {"kind": "full"}}
    wild = {**plain, "optim": {"lr": 1e9}, "train": {"steps": 6}}
    with pytest.raises(Diverged, match="No validation had a finite perplexity, so there are no best weights; in a"):
        train(recipe_file, out=tmp_path, reporter=LineReporter(), **wild)
    said = capsys.readouterr().err
    assert "validation perplexity inf\n" in said
    assert "best so far" not in said
    folder = RunFolder(tmp_path)
    assert not folder.best.exists()
    assert not folder.result.exists()
    with pytest.raises(Diverged, match="No validation had a finite perplexity"):
        train(out=tmp_path, resume=True)


def test_a_run_that_learned_nothing_is_told_to_whoever_only_calls(
    recipe_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(recipe_file, out=tmp_path, optim={"lr": 1.0}, train={"steps": 20})
    assert math.isfinite(run.result["valid_perplexity"])
    assert [r.levelname for r in caplog.records if r.message == shortfall(run.result)] == ["WARNING"]
    assert json.loads((tmp_path / "result.json").read_text())["best_step"] > 0
