"""The demo, whole but for its size: another text, few steps."""

import json
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


def test_compares_five_models_packs_the_best_and_writes_a_report(
    small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.run_demo(Path("runs/demo"))
    shown = capsys.readouterr()
    for name in demo.MODELS:
        assert f"\n{name}: a " in shown.out  # a sentence on each, below the table
        assert f"{name}: " in shown.err
        assert Path("runs/demo", name, "result.json").exists()
    rows = json.loads(Path("runs/demo/demo.json").read_text())["rows"]
    *trained, packed = rows
    assert [row["model"] for row in trained] == list(demo.MODELS)
    best = min(trained, key=lambda row: row["valid_perplexity"])
    assert packed["packed_from"] == best["model"]
    assert packed["model"] == f"{best['model']}, packed"
    assert packed["table_bytes"] < best["table_bytes"] / 4
    assert packed["test_perplexity"] == pytest.approx(best["test_perplexity"], rel=0.05)
    assert all(row["ms_per_look_up"] > 0 for row in rows)
    assert f"{best['table_bytes'] / packed['table_bytes']:.1f} times smaller than that of {best['model']}" in shown.out
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
    assert demo.others_at_work() == "Other programs use this machine (a load of 4.2 on 2 cores)"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.9, 9.0, 9.0), raising=False)
    assert demo.others_at_work() == ""
    monkeypatch.delattr(os, "getloadavg")
    assert demo.others_at_work() == ""


def test_each_line_of_the_table_is_said_beside_the_one_that_it_compares_with() -> None:
    rows = [
        {"model": "plain", "table_bytes": 4000, "test_perplexity": 100.0},
        {"model": "scaled", "table_bytes": 4000, "test_perplexity": 98.0},
        {"model": "narrow", "table_bytes": 1000, "test_perplexity": 110.0},
        {"model": "wide", "table_bytes": 8000, "test_perplexity": 90.0},
        {"model": "scaled, packed", "packed_from": "scaled", "table_bytes": 250, "test_perplexity": 98.49},
    ]
    assert demo.sentences(rows)[:-1] == [
        "plain: a full table. The other models are compared with it.",
        "scaled: a table of equal size, test perplexity 2.0% lower.",
        "narrow: a table 4.0 times smaller, test perplexity 10.0% higher.",
        "wide: a table 2.0 times larger, test perplexity 10.0% lower.",
        "scaled, packed: a table 16.0 times smaller than that of scaled, test perplexity 0.5% higher.",
    ]
