"""The long runs: every row builds a model, a group trains and is measured, the tables say what is missing."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from torchdefine.errors import UserError
from torchdefine.recipe import load_recipe
from torchdefine.task import find_task

run_long, long_tables = import_module("run_long"), import_module("long_tables")
RUNS = {run.name: run for run in run_long.long_runs()}
TINY_LSTM = {
    "context": {"layers": 1, "hidden_dim": 16},
    "train": {"steps": 4, "epochs": None, "batch_size": 2, "length": 5, "precision": "fp32", "eval_every": 2},
}
TINY_TRANSLATOR = {
    "data": {"vocabulary_size": 60},
    "embedding": {"map_dim": 8},
    "unit": {"embedding_dim": 16},
    "context": {"encoder_layers": 1, "decoder_layers": 1, "hidden_dim": 16, "heads": 2},
    "train": {"steps": 4, "batch_tokens": 60, "precision": "fp32", "eval_every": 2, "checkpoint_every": 2},
}


def test_names_groups_and_claims_fit_together() -> None:
    assert len({run.file for run in RUNS.values()}) == len(RUNS)
    for claim in run_long.described()["claims"]:
        assert {claim["row"], claim["against"]} <= RUNS.keys()
    for run in RUNS.values():
        assert set(run.takes) <= RUNS.keys()
        assert set(run.after) <= run_long.AFTER.keys()


@pytest.mark.parametrize("name", RUNS)
def test_every_row_is_a_model_that_can_be_built(name: str) -> None:
    recipe = load_recipe(RUNS[name].recipe, RUNS[name].changes)
    model, _ = find_task(recipe.task).count(recipe)
    assert model.parameters_by_part()["total"] > 2e7


def test_a_unit_and_the_mlp_of_its_size_are_equally_large() -> None:
    sizes = {}
    for name in ("Transformer-XL DeFINE 64", "Transformer-XL MLP 64"):
        recipe = load_recipe(RUNS[name].recipe, RUNS[name].changes)
        sizes[name] = find_task("language").count(recipe)[0].parameters_by_part()["define"]
    assert sizes["Transformer-XL MLP 64"] == pytest.approx(sizes["Transformer-XL DeFINE 64"], rel=0.01)


def run_group(
    monkeypatch: pytest.MonkeyPatch, group: str, out: Path, changes: dict[str, Any], also: Path | None = None
) -> None:
    arguments = ["run_long.py", group, "--data", str(out / "texts"), "--out", str(out), "--runs", str(out / "runs")]
    more = [] if also is None else ["--also", str(also)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--changes", json.dumps(changes), *more])
    run_long.main()


def read(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / RUNS[name].file).read_text())
    return found


def test_a_row_takes_the_best_of_the_rows_it_names_and_is_measured_with_a_neural_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "ptb").symlink_to(corpus)
    with pytest.raises(UserError, match=r"PTB DeFINE takes the best of PTB DeFINE dropout 0\.1, .* run them first"):
        run_group(monkeypatch, "ptb-define", tmp_path, TINY_LSTM)
    for name, valid in zip(RUNS["PTB DeFINE"].takes, (3.0, 1.0, 2.0), strict=True):
        (tmp_path / RUNS[name].file).write_text(json.dumps({"valid_perplexity": valid}))
    monkeypatch.setattr("torchdefine.tasks.language.run.WINDOWS", (10,))
    run_group(monkeypatch, "ptb-define", tmp_path, TINY_LSTM)
    result = read(tmp_path, "PTB DeFINE")
    assert result["settings"]["unit"]["dropout"] == 0.3
    assert result["after"]["neural-cache"]["neural_cache"]["window"] == 10
    assert result["after"]["neural-cache"]["test"]["perplexity"] != result["test_perplexity"]
    before = (tmp_path / RUNS["PTB DeFINE"].file).read_bytes()
    run_group(monkeypatch, "ptb-define", tmp_path, TINY_LSTM)
    assert (tmp_path / RUNS["PTB DeFINE"].file).read_bytes() == before
    assert not list((tmp_path / "runs").glob("*"))


def test_a_translator_is_averaged_and_scored_on_other_texts(
    bitext_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "europarl").symlink_to(bitext_folder)
    monkeypatch.setattr(run_long, "long_runs", lambda: iter([RUNS["Translation DeFINE"]]))
    run_group(monkeypatch, "translation-define", tmp_path, TINY_TRANSLATOR, also=bitext_folder)
    result = read(tmp_path, "Translation DeFINE")
    averaged = result["after"]["averaged"]
    assert averaged["steps"] == [2, 4]
    assert averaged["also"][bitext_folder.name]["perplexity"] == averaged["test"]["perplexity"]
    assert result["also"][bitext_folder.name]["perplexity"] == pytest.approx(result["test_perplexity"], rel=1e-6)


def keep(folder: Path, name: str, **facts: Any) -> None:
    sizes = {"parameters": {"total": 55_660_000}, "tokens": 765_000_000, "seed": 1, "commit": "0123456789abcdef"}
    origin = {"data": {"corpus": "a text"}, "hardware": {"gpu": "a GPU"}, "versions": {"torch": "2.11.0"}}
    (folder / RUNS[name].file).write_text(json.dumps({**sizes, **origin, **facts}))


def test_tables_compare_with_the_fair_baseline_and_name_what_has_not_run(tmp_path: Path) -> None:
    assert "| LSTM | 41.17 |" + " not run |" * 5 in long_tables.long_section(tmp_path)
    keep(tmp_path, "Transformer-XL DeFINE 64", valid_perplexity=50.0, test_perplexity=49.5)
    keep(tmp_path, "Transformer-XL projective 64", valid_perplexity=51.0, test_perplexity=55.0)
    kept = {"name": "computed", "bytes": 7e6, "perplexity": 40.0, "ms_per_batch": 3.0, "look_up_ms": 0.5}
    bits = {**kept, "name": "bits", "bytes": 2e6, "perplexity": 40.4}
    rows = [{**row, "seconds_to_make": 1.0} for row in (kept, bits)]
    keep(tmp_path, "Transformer-XL DeFINE 128", valid_perplexity=45.0, test_perplexity=44.0, after={"packed": rows})
    section = long_tables.long_section(tmp_path)
    assert "| Transformer-XL, n = 64 | 29.1 | 49.50 | 42% | 55.00 | -10.0% | 1 and 1 |" in section
    assert "| Transformer-XL, n = 128 | 26.33 |" + " not run |" * 5 in section
    assert "| Transformer-XL DeFINE 128 | bits | 2.00 | 40.40 | +1.0% | 3.00 | 0.500 | 1.0 |" in section
    assert section.splitlines()[-1] == "texts a text; hardware a GPU; torch 2.11.0; commit 0123456789ab."


def test_a_translator_s_seeds_count_and_its_averaged_score(tmp_path: Path) -> None:
    scores = {"valid_perplexity": 5.0, "test_perplexity": 5.0, "test_bleu": 38.0}
    keep(tmp_path, "Translation DeFINE", **scores, after={"averaged": {"test": {"bleu": 39.0}}})
    keep(tmp_path, "Translation projection", **scores)
    keep(tmp_path, "Translation projection seed 2", **{**scores, "test_bleu": 39.0})
    assert "| translation | 27.01 | 39.00 | 12% | 38.50 | +0.50 BLEU | 1 and 2 |" in long_tables.long_section(tmp_path)
