"""What a person sees of a training, and that every number is called what it is."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchdefine import train
from torchdefine.training.progress import BarReporter, LineReporter, clock

SHORT = {"steps": 14, "log_every": 7}


def trained_lines(recipe_file: Path, out: Path, **settings: Any) -> tuple[list[str], list[dict[str, Any]]]:
    shown = io.StringIO()
    run = train(recipe_file, out=out, reporter=LineReporter(shown, seconds_between=0), train=SHORT, **settings)
    return [line for line in shown.getvalue().splitlines() if "tokens/s" in line], run.folder.records("train")


def test_a_plain_training_loss_has_its_perplexity(recipe_file: Path, tmp_path: Path) -> None:
    lines, records = trained_lines(recipe_file, tmp_path / "run")
    assert all("  loss " in line and "  perplexity " in line for line in lines)
    assert all("perplexity" in record and "label_smoothing" not in record for record in records)


def test_a_smoothed_training_loss_is_called_so_and_has_no_perplexity(recipe_file: Path, tmp_path: Path) -> None:
    lines, records = trained_lines(recipe_file, tmp_path / "run", loss={"label_smoothing": 0.1})
    assert len(lines) == len(records) == 2
    assert all("  smoothed loss " in line and "perplexity" not in line for line in lines)
    assert all("perplexity" not in record and record["label_smoothing"] == 0.1 for record in records)


def test_a_line_comes_now_and_then_and_at_the_end_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown = [0.0], io.StringIO()
    monkeypatch.setattr("torchdefine.training.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    reporter = LineReporter(shown, seconds_between=5)
    reporter.started(40, 100)
    for step, now[0] in ((50, 100.0), (52, 102.0), (100, 103.0)):
        reporter.trained({"step": step, "loss": 2.0, "perplexity": 7.389, "tokens_per_second": 10.0})
    measured = "loss 2.000  perplexity 7.4  10 tokens/s"
    assert shown.getvalue().splitlines() == [
        "resuming from step 40 of 100",
        f"step 50/100  {measured}  8:20 left",  # ten seconds a step since the run went on
        f"step 100/100  {measured}  0:00 left",
    ]
    assert clock(3725) == "1:02:05"


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        ({"loss": 2.0, "perplexity": 7.389}, "loss 2.00 ppl 7.4 1.5k tok/s"),
        ({"loss": 2.0, "label_smoothing": 0.1}, "smoothed loss 2.00 1.5k tok/s"),
    ],
)
def test_a_bar_says_the_same(measured: dict[str, float], shown: str) -> None:
    reporter = BarReporter()
    reporter.started(0, 10)
    reporter.trained({"step": 7, "tokens_per_second": 1500.0, **measured})
    reporter.finished()
    assert reporter.bar.tasks[0].description == shown


def test_tensorboard_names_a_smoothed_loss(recipe_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from torchdefine.training.progress import Reporter, TensorBoardReporter

    reporter = TensorBoardReporter(Reporter(), str(tmp_path / "tensorboard"))
    train(recipe_file, out=tmp_path / "run", reporter=reporter, train=SHORT, loss={"label_smoothing": 0.1})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert "train/smoothed_loss" in events.Tags()["scalars"]
    assert "train/loss" not in events.Tags()["scalars"]
