"""The demo, whole but for its size: another text, few steps."""

import os
from pathlib import Path
from typing import Any

import pytest

from torchdefine import demo, train
from torchdefine.errors import UserError


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    words = [f"w{number}" for number in range(6000)]
    for split, lines in (("train", 600), ("valid", 20), ("test", 20)):
        text = (" ".join(words[(7 * line + place) % 6000] for place in range(20)) for line in range(lines))
        (corpus / f"{split}.txt").write_text("\n".join(text) + "\n")

    def train_little(*arguments: Any, **options: Any) -> Any:
        return train(*arguments, data=corpus, train={"steps": 3, "eval_every": 3, "log_every": 1}, **options)

    monkeypatch.setattr(demo, "train", train_little)
    monkeypatch.chdir(tmp_path)


def test_compares_five_models_and_writes_a_report(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    demo.run_demo(Path("runs/demo"))
    shown = capsys.readouterr()
    for name in demo.MODELS:
        assert name in shown.out
        assert f"{name}: " in shown.err
        assert Path("runs/demo", name, "result.json").exists()
    assert Path("runs/demo/report.html").read_text().startswith("<!doctype html>")
    assert "is in runs/demo/report.html" in shown.out
    before = Path("runs/demo/standard/result.json").stat().st_mtime_ns
    demo.run_demo(Path("runs/demo"))  # what is there is used
    assert Path("runs/demo/standard/result.json").stat().st_mtime_ns == before


def test_a_folder_of_other_things_is_left_alone(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"corpus has test\.txt in it, which is not the demo's"):
        demo.run_demo(Path("corpus"))
    with pytest.raises(UserError, match=r"is a file"):
        demo.run_demo(Path("corpus/test.txt"))
    assert capsys.readouterr().out == ""


def test_says_once_what_holds_for_every_model(small: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="torchdefine")
    demo.run_demo(Path("runs/demo"))
    said = [sentence for sentence in caplog.messages if sentence.startswith(("The training text", "The vocabulary"))]
    assert len(said) == len(set(said)) == 2
    assert len([sentence for sentence in caplog.messages if " of the validation text is " in sentence]) == 1
    train("demo/standard", data="corpus", out="again", train={"steps": 3})  # who trains after the demo is told as ever
    assert caplog.messages.count(said[0]) == 2


def test_speaks_of_a_busy_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (4.25, 1.0, 1.0), raising=False)
    assert demo.others_at_work() == "Other programs keep this machine busy (a load of 4.2 on 2 cores)"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.9, 9.0, 9.0), raising=False)
    assert demo.others_at_work() == ""
    monkeypatch.delattr(os, "getloadavg")
    assert demo.others_at_work() == ""
