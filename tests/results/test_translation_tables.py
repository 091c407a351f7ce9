"""The script behind the translation tables: it trains, scores on further test sets, and does nothing twice."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest

from torchdefine.errors import UserError

pytest.importorskip("sacrebleu")
run_translation, tables, speed = map(import_module, ("run_translation", "translation_tables", "speed"))
TINY = {
    "data": {"bpe_size": 280},
    "embedding": {"map_dim": 16},
    "context": {"encoder_layers": 1, "decoder_layers": 1, "heads": 2, "hidden_dim": 32},
    "train": {"batch_tokens": 400, "steps": 4, "eval_every": 2, "checkpoint_every": 4, "precision": "fp32"},
}


def test_translators_are_scored_on_other_bitexts_too(
    bitext_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "europarl"
    arguments = ["run_translation.py", "tatoeba/laptop", "--data", str(bitext_folder), "--also", str(bitext_folder)]
    arguments += ["--out", str(out), "--runs", str(tmp_path / "runs"), "--changes", json.dumps(TINY)]
    monkeypatch.setattr(sys, "argv", arguments)
    run_translation.main()
    record = json.loads((out / "laptop.json").read_text())
    (name,) = record["also"]
    assert record["also"][name]["bleu"] == pytest.approx(record["test_bleu"])
    assert record["also"][name]["perplexity"] == pytest.approx(record["test_perplexity"])
    monkeypatch.setitem(tables.draw_curves.__globals__, "HERE", tmp_path)  # or it would draw over the real picture
    table = tables.translation_section(out)
    assert (tmp_path / "figures" / "europarl.svg").is_file()
    assert f"| {name}, BLEU | {name}, chrF |" in table
    assert f"| {record['tokens_per_second']:,.0f} |" in table
    run_translation.main()
    assert "is not run again" in capsys.readouterr().out


def test_a_test_set_that_is_not_there_is_refused_before_any_training(
    bitext_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-test").mkdir()
    for split, language in (("valid", "en"), ("valid", "de")):
        shutil.copy(bitext_folder / f"{split}.{language}", tmp_path / "no-test")
    for wrong in ("nowhere", str(tmp_path / "no-test")):
        arguments = ["run_translation.py", "tatoeba/laptop", "--data", str(bitext_folder), "--also", wrong]
        arguments += ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"), "--changes", json.dumps(TINY)]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(UserError, match=r"no test text|neither a folder"):
            run_translation.main()
        assert not (tmp_path / "runs").exists()


def test_a_recipe_that_was_broken_off_goes_on(
    bitext_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run_translation.py", "tatoeba/laptop", "--data", str(bitext_folder)]
    arguments += ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"), "--changes", json.dumps(TINY)]
    monkeypatch.setattr(sys, "argv", arguments)
    run_translation.main()
    file = tmp_path / "out" / "laptop.json"
    record = json.loads(file.read_text())
    file.unlink()
    (tmp_path / "runs" / "tatoeba-laptop" / "result.json").unlink()
    run_translation.main()
    assert json.loads(file.read_text())["test_bleu"] == record["test_bleu"]


def test_the_speed_of_training_leaves_compiling_and_validation_out() -> None:
    seconds = [30.0, 31.0, 32.0, 39.0, 40.0, 41.0, 42.0]
    curve = [{"step": 10 * place, "tokens": 100 * (place + 1), "seconds": at} for place, at in enumerate(seconds)]
    assert speed.training_speed({"tokens_per_second": 16.7, "train_curve": curve}) == 100
    after_every_line = {"tokens_per_second": 16.7, "train_curve": curve, "curve": curve}
    assert speed.training_speed(after_every_line) == 16.7  # each stretch begins with a validation
    once = {"tokens_per_second": 16.7, "train_curve": curve, "curve": [{"step": 25}]}
    curve[3:] = [{**point, "seconds": point["seconds"] - 6} for point in curve[3:]]  # 1 second of the 7 was training
    assert speed.training_speed(once) == 100
    assert speed.training_speed({"tokens_per_second": 16.7, "train_curve": curve[:3]}) == 16.7
    seconds = [8.0 * (place // 2) + 7 * (place % 2) for place in range(10)] + [39.5]
    curve = [{"step": 10 * place, "tokens": 100 * (place + 1), "seconds": at} for place, at in enumerate(seconds)]
    at_every_other = {"train_curve": curve, "curve": [{"step": step} for step in range(0, 100, 20)]}
    assert speed.training_speed(at_every_other) == 100  # a line is logged before its validation
    assert speed.training_speed({"tokens_per_second": 16.7}) == 16.7
