"""The stages of results/: every row is a recipe that can be built, and a stage runs, stops and goes on."""

import argparse
import json
import sys
from dataclasses import replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmarks.measuring import Setting
from old_names import read_run, settings_of

from torchdefine.embedding import VocabularyFacts
from torchdefine.errors import UserError
from torchdefine.recipe import load_recipe, merged
from torchdefine.tasks.language import build_language_model
from torchdefine.training.step import Batch, Part

RESULTS = Path(__file__).parent.parent.parent / "results"


run_stage, stage_tables, claims, time_rows = map(import_module, ("run_stage", "stage_tables", "claims", "time_rows"))
STAGES = sorted(path.stem for path in (RESULTS / "stages").glob("[a-z]*.yaml"))


BEST = {"tuning": 2, "unit-choices": 3, "long-rates": 2}


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Results of stages that others take: these rows are the best."""
    schedule = yaml.safe_load((RESULTS / "stages" / "_schedule.yaml").read_text())
    for stage, best in BEST.items():
        for place, row in enumerate(run_stage.read_stage(stage)["rows"]):
            apart = abs(place - best)  # the test text, which must not choose, says the opposite
            measured = {"valid_perplexity": 100.0 + apart, "test_perplexity": 100.0 - apart}
            outcome = {"diverged": "at once"} if place == 0 else measured
            folder = tmp_path / stage
            folder.mkdir(exist_ok=True)
            settings = load_recipe(row["recipe"], merged(schedule, run_stage.own_settings(row))).to_plain()
            (folder / f"{place}.json").write_text(json.dumps({"row": row["name"], "settings": settings, **outcome}))
    return tmp_path


def test_the_best_of_a_stage_is_taken_and_a_stage_without_it_does_not_run(tuned: Path) -> None:
    best = {stage: run_stage.read_stage(stage)["rows"][place] for stage, place in BEST.items()}
    rows = {row.name: row for row in run_stage.rows_of("decisive", tuned) if row.seed == 1}
    for row in rows.values():
        assert row.changes["optim"] == {"kind": "sgd", "clip": 0.25, **best["long-rates"]["optim"]}
    assert rows["R3"].changes["unit"] == best["unit-choices"]["unit"]
    assert rows["R2"].changes.get("embedding") is rows["R2 scaled"].changes.get("embedding") is None
    assert load_recipe(rows["R2 scaled"].recipe).embedding.scale == "unit-rms"
    (tuned / "long-rates" / f"{BEST['long-rates']}.json").unlink()
    with pytest.raises(UserError, match="run that stage first"):
        run_stage.rows_of("decisive", tuned)
    for file in (tuned / "unit-choices").glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "diverged": "at once"}))
    with pytest.raises(UserError, match="all of its rows diverged"):
        run_stage.best_row("unit-choices", tuned)


@pytest.mark.parametrize("stage", STAGES)
def test_rows_of_a_stage_differ_only_in_what_they_say(stage: str, tuned: Path) -> None:
    rows = run_stage.rows_of(stage, tuned)
    assert len({row.file for row in rows}) == len(rows)
    schedules, shared, models = set(), set(), []
    for row in rows:
        recipe = load_recipe(row.recipe, row.changes)
        models.append(
            ([recipe.embedding, recipe.unit, recipe.context, recipe.output, recipe.optim, recipe.schedule], row.seed)
        )
        with torch.device("meta"):
            model = build_language_model(recipe, VocabularyFacts(253_443))
        assert model.parameters_by_part()["total"] > 1e6
        assert recipe.train.seed == row.seed
        schedule = None if row.name.startswith("rate") else (recipe.schedule, recipe.optim)
        schedules.add(schedule)
        shared.add((recipe.train.steps, recipe.train.batch_size, recipe.train.precision, recipe.eval))
    assert len(shared) == 1
    assert len(schedules - {None}) <= 1
    assert all(one != other for one, other in combinations(models, 2))


def test_a_row_without_a_skip_has_none(tuned: Path) -> None:
    plans = {}
    for row in run_stage.rows_of("ablation-clean", tuned):
        with torch.device("meta"):
            model = build_language_model(load_recipe(row.recipe, row.changes), VocabularyFacts(253_443))
        plans[row.name] = getattr(model.embedding, "plan", None)
    assert plans.pop("one projection") is None
    without = {"linear, no skip", "GLT", "GLT and shuffle", "HGT", "residual, all layers 704 wide"}
    assert {name for name, plan in plans.items() if not any(layer.skipped_width for layer in plan)} == without
    expansions = {name: tuple(layer.output_width for layer in list(plan)[:-1]) for name, plan in plans.items()}
    of_one_width = {name for name in plans if "704" in name}
    assert len({expansions[name] for name in plans.keys() - of_one_width}) == 1
    assert {expansions[name] for name in of_one_width} == {(704,) * 6}


def test_seeds_come_in_turns_and_the_unit_and_the_mlp_are_of_a_size(tuned: Path) -> None:
    rows = run_stage.rows_of("decisive", tuned)
    assert [row.seed for row in rows] == [1] * 8 + [2] * 3
    sizes = {}
    for row in rows:
        with torch.device("meta"):
            model = build_language_model(load_recipe(row.recipe, row.changes), VocabularyFacts(253_443))
        sizes[row.name] = model.parameters_by_part()["define"]
    assert sizes["R2 and an MLP of the unit's size"] == pytest.approx(sizes["R3"], rel=0.01)


def finished_row(stage: str, name: str, tuned: Path, **facts: object) -> dict[str, Any]:
    """What the JSON of a row says, as far as the table asks."""
    row = next(row for row in run_stage.rows_of(stage, tuned) if row.name == name)
    settings = load_recipe(row.recipe, row.changes)
    return {
        "recipe": row.recipe,
        "settings": settings_of(settings),
        "parameters": {"define": int(settings.unit.kind != "none"), "context": 1, "input_output": 1, "total": 3},
        "valid_perplexity": 50.0,
        "test_perplexity": 60.0,
        "steps": 100,
        "tokens": 9000,
        "seconds": 3.0,
        "tokens_per_second": 4500.0,
        **facts,
    }


def cell(column: str, run: dict[str, Any]) -> str:
    return dict(zip(stage_tables.HEADER[1:], stage_tables.cells_of([run], None), strict=True))[column]


@pytest.mark.parametrize(
    ("stage", "name", "published"),
    [
        ("decisive", "R2", "44.87"),
        ("decisive", "R3", "41.17"),  # scaled and without norms, of which the paper says nothing
        ("decisive", "R2 scaled", "–"),
        ("decisive", "R2 and a projection", "–"),
        ("depth", "R2 scaled, n = 512", "–"),
        ("depth", "N = 7, n = 256", "–"),
        ("ablation", "HGT", "40.92"),
        ("ablation-clean", "HGT", "–"),
    ],
)
def test_the_papers_number_stands_beside_the_papers_model_alone(
    stage: str, name: str, published: str, tuned: Path
) -> None:
    assert cell("paper's test", finished_row(stage, name, tuned)) == published


def test_a_run_from_before_a_setting_was_there_is_still_the_papers(tuned: Path) -> None:
    run = finished_row("decisive", "R2", tuned)
    del run["settings"]["context"]["recurrent_dropout"]
    (tuned / "run.json").write_text(json.dumps(run))
    assert cell("paper's test", read_run(tuned / "run.json")) == "44.87"


def test_a_model_with_another_output_is_not_the_papers(tuned: Path) -> None:
    run = finished_row("decisive", "R2", tuned)
    run["settings"]["output"]["tied"] = "none" if run["settings"]["output"]["tied"] == "table" else "table"
    assert cell("paper's test", run) == "–"


def test_a_step_takes_no_longer_where_validation_does(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_row("decisive", "R2", tuned)
    assert cell("ms/step", run) == "–"  # too few steps to tell
    monkeypatch.setattr(stage_tables, "STEPS_TO_TELL", 100)
    assert (cell("ms/step", run), cell("tokens/s", run)) == ("20.0", "4,500")  # 2 of the 3 seconds were training
    shared = finished_row("decisive", "R2", tuned, shared_device=True)
    assert (cell("ms/step", shared), cell("tokens/s", shared)) == ("–", "–")


def test_what_the_lstm_reads_is_measured_over_the_text() -> None:
    class Run:
        embedding = torch.nn.Embedding.from_pretrained(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]]))
        embedding.table = lambda: Run.embedding.weight

        def token_counts(self) -> list[int]:
            return [1, 2, 7]

    text = torch.tensor([0, 1, 1, *[2] * 7])
    assert run_stage.input_rms(Run()) == pytest.approx(float(Run.embedding(text).square().mean().sqrt()))


def test_a_column_has_the_mean_of_those_who_know_it(tuned: Path) -> None:
    run = finished_row("decisive", "R2", tuned)
    assert cell("input RMS", run) == "–"
    runs = [run, {**run, "input_rms": 2.0}, {**run, "input_rms": 3.0}]
    assert dict(zip(stage_tables.HEADER[1:], stage_tables.cells_of(runs, None), strict=True))["input RMS"] == "2.50"


def test_a_row_of_several_seeds_has_their_means_and_their_range(tuned: Path) -> None:
    run = finished_row("decisive", "R2", tuned)
    seeds = [
        {**run, "valid_perplexity": v, "test_perplexity": t} for v, t in ((50.0, 60.0), (56.0, 66.0), (53.0, 54.0))
    ]
    reference = [{**run, "test_perplexity": test} for test in (70.0, 90.0)]
    found = dict(zip(stage_tables.HEADER[1:], stage_tables.row_cells(seeds, reference), strict=True))
    columns = ("seeds", "valid", "test", "range", "against reference")
    assert [found[column] for column in columns] == ["3", "53.00", "60.00", "12.00", "-25.0%"]
    assert [cell(column, run) for column in columns] == ["1", "50.00", "60.00", "–", "–"]


def test_parameters_and_tokens_are_in_millions(tuned: Path) -> None:
    sizes = {"define": 1_250_000, "context": 2_000_000, "input_output": 30_000_000, "total": 33_250_000}
    run = finished_row("decisive", "R3", tuned, parameters=sizes, tokens=78_340_000)
    columns = ("unit", "context", "tables", "total M", "M tokens")
    assert [cell(column, run) for column in columns] == ["1.25", "2.00", "30.00", "33.25", "78.3"]


def test_a_step_that_was_timed_alone_stands_for_a_run_that_shared_its_device(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_tables, "STEPS_TO_TELL", 100)
    setting = Setting(torch.device("cpu"), small=True, repeats=2, data="wikitext-2-shuffled")
    text = Batch([Part((torch.zeros(2, 5, dtype=torch.long),) * 2, torch.zeros(2, 5).numpy())], 10)
    monkeypatch.setattr(time_rows, "text_batch", lambda *_: text)
    row = run_stage.rows_of("decisive", tuned)[0]
    monkeypatch.setattr(time_rows, "rows_of", lambda *_: [replace(row, changes=merged(row.changes, TINY))])
    monkeypatch.setattr(time_rows, "WIKIPEDIA_SIZE", 100)
    (tuned / "speeds.json").write_text(json.dumps({"stages": {"depth": {"rows": {}}}}))
    time_rows.time_stage("decisive", tuned, setting)
    written = json.loads((tuned / "speeds.json").read_text())
    assert "depth" in written["stages"]
    timed = written["stages"]["decisive"]["rows"]["R2 scaled"]
    assert timed["tokens"] == 10
    assert 0 < timed["q1_ms"] <= timed["ms"] <= timed["q3_ms"]
    timed["ms"] = 2.0
    (tuned / "speeds.json").write_text(json.dumps(written))
    (tuned / "decisive").mkdir()
    shared = finished_row("decisive", "R2 scaled", tuned, shared_device=True, row="R2 scaled")
    (tuned / "decisive" / "x.json").write_text(json.dumps(shared))
    (runs,) = stage_tables.read_rows(tuned / "decisive").values()
    assert stage_tables.speed_cells(runs) == ["2.0", "5,000"]
    written["stages"]["decisive"] |= {"hardware": {"gpu": "a GPU"}, "commit": "0123456789abcdef"}
    (tuned / "speeds.json").write_text(json.dumps(written))
    assert "words of wikitext-2-shuffled, mapped to a vocabulary of 100: a GPU" in stage_tables.how_timed(
        tuned / "decisive"
    )
    assert stage_tables.how_timed(tuned / "ablation") == ""
    assert stage_tables.speed_cells([{**runs[0], "shared_device": False}]) == ["20.0", "4,500"]


def test_another_text_need_not_have_a_test_part(tuned: Path) -> None:
    valid_alone = {"corpus": "x", "valid": {"perplexity": 70.0}}
    assert cell("other text", finished_row("decisive", "R2", tuned, also=valid_alone)) == "–"
    both = {**valid_alone, "test": {"perplexity": 80.0}}
    assert cell("other text", finished_row("decisive", "R2", tuned, also=both)) == "80.00"


TINY = {
    "embedding": {"cutoffs": [10, 20], "division": 2, "map_dim": 16},
    "context": {"layers": 1, "hidden_dim": 16},
    "train": {"steps": 4, "batch_size": 2, "length": 5, "precision": "fp32", "eval_every": 2},
}


def test_a_stage_runs_in_parts_and_its_table_says_what_is_missing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run_stage.py", "tuning", "--data", str(corpus), "--also", str(corpus), "--out", str(tmp_path)]
    arguments += ["--runs", str(tmp_path / "runs"), "--changes", json.dumps(TINY), "--shared"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--seconds", "1e-9"])
    run_stage.main()
    expected = sorted(row.file for row in run_stage.rows_of("tuning", tmp_path))
    begun = len(list((tmp_path / "tuning").glob("*.json")))
    assert begun < len(expected)
    said = capsys.readouterr().out
    assert "not enough time left" in said
    assert said.splitlines()[-1].count("seed 1") == len(expected) - begun
    table = stage_tables.stage_section(tmp_path / "tuning")
    assert "not run" in table
    monkeypatch.setattr(sys, "argv", arguments)
    run_stage.main()
    files = sorted(path.name for path in (tmp_path / "tuning").glob("*.json"))
    assert files == expected
    before = {path: path.read_bytes() for path in (tmp_path / "tuning").glob("*.json")}
    run_stage.main()
    assert {path: path.read_bytes() for path in (tmp_path / "tuning").glob("*.json")} == before
    record = json.loads(next(iter(before.values())))
    assert record["shared_device"]
    assert record["input_rms"] > 0
    assert all(point["gradient_norm"] > 0 for point in record["train_curve"])
    for split in ("valid", "test"):
        assert record["also"][split]["perplexity"] == pytest.approx(record[f"{split}_perplexity"], rel=1e-6)
    monkeypatch.setattr(stage_tables, "draw_curves", lambda name, runs: "figures/x.svg")
    table = stage_tables.stage_section(tmp_path / "tuning")
    assert "not run" not in table
    assert "diverged" not in table
    assert record["data"]["splits"]["train"]["text_sha256"] in table
    assert not list((tmp_path / "runs").rglob("config.yaml"))


def test_stages_run_in_turn_and_the_next_takes_what_the_first_found(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_stage, "HERE", tmp_path)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "_schedule.yaml").write_text("{}")
    row = {"name": "faster", "recipe": "table1a/r2", "optim": {"lr": 3}}
    first = {"title": "Rates", "steps": 4, "common": TINY, "rows": [row]}
    second = {**first, "takes": ["first"], "rows": [{"name": "R3", "recipe": "table1a/r3"}]}
    for name, stage in {"first": first, "second": second}.items():
        (tmp_path / "stages" / f"{name}.yaml").write_text(json.dumps(stage))
    arguments = ["first", "second", "--data", str(corpus), "--out", str(tmp_path), "--runs", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", ["run_stage.py", *arguments, "--seconds", "1e-9"])
    run_stage.main()
    assert "not all has run: faster, seed 1." in capsys.readouterr().out  # and nothing is taken from what did not run
    monkeypatch.setattr(sys, "argv", ["run_stage.py", "first", "thrid", *arguments[2:]])
    with pytest.raises(UserError, match="no stage 'thrid'"):
        run_stage.main()
    assert not (tmp_path / "first").exists()
    monkeypatch.setattr(sys, "argv", ["run_stage.py", *arguments])
    run_stage.main()
    found = json.loads((tmp_path / "second" / "r3-seed-1.json").read_text())
    assert found["settings"]["optim"]["lr"] == 3


def test_what_ran_for_another_stage_does_not_run_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_stage, "HERE", tmp_path)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "_schedule.yaml").write_text("{}")
    rows = [{"name": name, "recipe": "table1a/r2", "optim": {"lr": lr}} for name, lr in (("slow", 1), ("fast", 3))]
    first = {"title": "Rates", "steps": 4, "common": TINY, "rows": rows}
    second = {**first, "takes": ["first"], "rows": [{"name": "best", "recipe": "table1a/r2", "seeds": [1, 2]}]}
    for name, stage in {"first": first, "second": second}.items():
        (tmp_path / "stages" / f"{name}.yaml").write_text(json.dumps(stage))
    arguments = ["first", "second", "--data", str(corpus), "--out", str(tmp_path), "--runs", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", ["run_stage.py", *arguments])
    run_stage.main()
    ran, again, other_seed = (
        json.loads((tmp_path / file).read_text())
        for file in ("first/fast-seed-1.json", "second/best-seed-1.json", "second/best-seed-2.json")
    )
    assert again == {**ran, "stage": "second", "row": "best", "ran_for": "fast of first"}
    assert "ran_for" not in other_seed
    assert other_seed["valid_perplexity"] != ran["valid_perplexity"]
    assert "best, seed 1, is fast of first" in capsys.readouterr().out


@pytest.mark.parametrize("out_of_time", [False, True])
def test_a_stage_waits_for_what_another_process_has_of_those_that_it_takes(
    out_of_time: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes, slept = [], []

    def run_rows(stage: str, options: argparse.Namespace, clock: object) -> tuple[list[str], list[str]]:
        passes.append(stage)
        waiting = ["rate 28, seed 1"] if stage == "long-rates" and len(slept) == 3 and out_of_time else []
        return waiting, ["rate 20, seed 1"] if stage == "long-rates" and len(slept) < 3 else []

    monkeypatch.setattr(run_stage, "run_stage", run_rows)
    monkeypatch.setattr(run_stage.time, "sleep", slept.append)
    stages = ["long-rates", "unit-rates", "ablation"]
    monkeypatch.setattr(sys, "argv", ["run_stage.py", *stages, "--data", "x", "--out", str(tmp_path)])
    run_stage.main()
    assert passes == ["long-rates", "unit-rates", *["long-rates"] * 4, *([] if out_of_time else ["ablation"])]
    assert len(slept) == 3
    assert ("The stage ablation waits for long-rates." in capsys.readouterr().out) == out_of_time


def test_processes_share_the_rows_out(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run_stage.py", "tuning", "--data", str(corpus), "--out", str(tmp_path), "--runs", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--changes", json.dumps(TINY)])
    rows = run_stage.rows_of("tuning", tmp_path)
    options = argparse.Namespace(out=tmp_path, runs=tmp_path / "r", changes=TINY, data=str(corpus), also=None)
    with run_stage.claimed(rows[2], options) as ours:
        assert ours
        run_stage.main()
    expected = {row.file for row in rows}
    assert {path.name for path in (tmp_path / "tuning").glob("*.json")} == expected - {rows[2].file}
    run_stage.main()  # the claim went with who had it
    assert {path.name for path in (tmp_path / "tuning").glob("*.json")} == expected


def test_a_row_with_other_changes_leaves_a_run_alone_that_another_process_trains(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: list[Path] = []

    def begin(*_: object, out: Path, **__: object) -> None:
        out.mkdir(parents=True)
        live.append(out)
        raise run_stage.Diverged("enough")

    monkeypatch.setattr(run_stage, "train", begin)
    row = run_stage.rows_of("tuning", tmp_path)[0]
    for steps in (10, 20):
        changes = {"train": {"steps": steps}}
        run_stage.run_row(row, argparse.Namespace(out=tmp_path, runs=tmp_path, changes=changes, data=str(corpus)))
    assert all(folder.exists() for folder in live)
    assert len(set(live)) == 2


def test_a_row_whose_settings_or_texts_have_changed_since_runs_again(tuned: Path) -> None:
    options = argparse.Namespace(out=tuned, changes={}, data="elsewhere/text", also=None)
    rows = run_stage.rows_of("decisive", tuned)
    (tuned / "decisive").mkdir()
    for row in rows:
        settings = load_recipe(row.recipe, merged({"data": {"corpus": "text"}}, row.changes)).to_plain()
        del settings["loss"]["label_smoothing"]  # as if the run were older than that
        (tuned / "decisive" / row.file).write_text(json.dumps({"recipe": row.recipe, "settings": settings}))
    assert all(run_stage.has_run(row, options) for row in rows)
    for other in ({"data": "another"}, {"also": "other"}, {"changes": {"optim": {"lr": 3.0}}}):
        changed = argparse.Namespace(**{**vars(options), **other})
        plain = next(row for row in rows if row.name == "R2 scaled")
        assert not run_stage.has_run(plain, changed)
    file = tuned / "decisive" / rows[0].file
    file.write_text(json.dumps({**json.loads(file.read_text()), "diverged": "at once"}))
    assert run_stage.has_run(rows[0], argparse.Namespace(**{**vars(options), "also": "other"}))  # it has no weights
    file.unlink()
    assert not run_stage.has_run(rows[0], options)
    for row in rows[1:]:
        for other in ({"recipe": "table1a/r4"}, {"changes": merged(row.changes, {"embedding": {"map_dim": 8}})}):
            assert not run_stage.has_run(replace(row, **other), options)
        without = {**row.changes, "embedding": {}, "unit": {}}  # a setting that a row no longer names is another one
        says = {"embedding", "unit"} & row.changes.keys()
        assert run_stage.has_run(replace(row, changes=without), options) == (not says)


def test_a_stage_that_was_changed_since_is_not_taken(tuned: Path) -> None:
    file = tuned / "long-rates" / f"{BEST['long-rates']}.json"
    run = json.loads(file.read_text())
    run["settings"]["optim"]["lr"] = 19.0
    file.write_text(json.dumps(run))
    with pytest.raises(UserError, match=r"no result of rate 20 with the settings that it has now"):
        run_stage.rows_of("decisive", tuned)


def test_a_run_that_is_older_than_a_setting_had_its_default() -> None:
    settings = load_recipe("table1a/r2").to_plain()
    del settings["embedding"]["scale"]
    for scale in ("none", "unit-rms"):
        row = {"name": "R2", "recipe": "table1a/r2", "embedding": {"scale": scale}}
        assert run_stage.agrees(row, settings) is (scale == "none")


def test_a_table_says_whose_settings_a_run_has(tuned: Path) -> None:
    rows = {row.name: row for row in run_stage.rows_of("decisive", tuned) if row.seed == 1}
    ran = {
        name: [{"settings": settings_of(load_recipe(row.recipe, merged(row.changes, changes)))}]
        for (name, row), changes in zip(
            [(name, rows[name]) for name in ("R2 scaled", "R3")], [{}, {"unit": {"norm": "layer"}}], strict=True
        )
    }
    best = {stage: run_stage.read_stage(stage)["rows"][place]["name"] for stage, place in BEST.items()}
    described = run_stage.read_stage("decisive")
    said = stage_tables.taken(described, ran)
    assert said[0] == f"Settings taken from the row *{best['long-rates']}* of the stage `long-rates`: all rows."
    had = "a norm in every layer, input times 16"  # and not what is best now
    assert said[1:] == [f"Settings taken from the row *{had}* of the stage `unit-choices`: *R3*."]
    assert stage_tables.taken(described, {}) == []
    choice = {"norm": "none", "activation": "relu", "weight_scaling": False}  # the row without ReLU fits too
    relu = {"settings": settings_of(load_recipe("table1a/r3", {"embedding": {"scale": "unit-rms"}, "unit": choice}))}
    assert stage_tables.taken_row("unit-choices", relu) == "no norm, input times 16, ReLU"


def test_a_row_is_started_if_one_of_its_length_would_be_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(run_stage.time, "monotonic", lambda: now[0])
    clock = run_stage.Clock(100)
    assert clock.has_time_for(10**9)  # nothing is known yet
    with clock.watching(1000):
        now[0] += 20
    with clock.watching(1000):
        now[0] += 1
    assert clock.has_time_for(3000)  # 60 s of the 79 that are left, by the slower of the two
    assert not clock.has_time_for(5000)
    with clock.watching(3000):
        now[0] += 30
    assert clock.has_time_for(3000)
    assert clock.has_time_for(1000)
    now[0] += 30
    assert not clock.has_time_for(3000)
    assert not clock.has_time_for(1000)
    assert run_stage.Clock(None).has_time_for(10**9)


def test_a_second_text_that_is_not_there_is_refused_before_any_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run_stage.py", "tuning", "--data", str(corpus), "--also", str(tmp_path / "nowhere")]
    arguments += ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"), "--changes", json.dumps(TINY)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(UserError, match="neither a folder nor a corpus"):
        run_stage.main()
    assert not (tmp_path / "runs").exists()


def test_a_trial_does_not_go_among_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stage, "run_stage", pytest.fail)
    monkeypatch.setattr(sys, "argv", ["run_stage.py", "tuning", "--data", "x", "--changes", json.dumps(TINY)])
    with pytest.raises(UserError, match="say with --out where their files go"):
        run_stage.main()


def test_a_key_of_a_row_that_nothing_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = tmp_path / "stages"
    stages.mkdir()
    (stages / "_schedule.yaml").write_text("optim: {lr: 20}\n")
    (stages / "typo.yaml").write_text("steps: 5\nrows: [{name: A, recipe: table1a/r2, embeding: {scaled: true}}]\n")
    monkeypatch.setattr(run_stage, "HERE", tmp_path)
    with pytest.raises(UserError, match="embeding, which nothing reads"):
        run_stage.rows_of("typo", tmp_path)


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use one of"):
        run_stage.rows_of("decisions", tmp_path)


def test_a_row_that_diverges_is_a_result_and_the_next_one_runs(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_stage, "HERE", tmp_path)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "_schedule.yaml").write_text("optim: {lr: 1}\n")
    stage = {"title": "Rates", "steps": 4, "common": TINY, "reference": "mad"}
    rows = [{"name": "mad", "recipe": "table1a/r2", "optim": {"lr": 1e38}}, {"name": "mild", "recipe": "table1a/r2"}]
    (tmp_path / "stages" / "rates.yaml").write_text(json.dumps({**stage, "rows": rows}))
    arguments = ["run_stage.py", "rates", "--data", str(corpus), "--out", str(tmp_path), "--runs", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--keep"])
    run_stage.main()
    assert list((tmp_path / "r" / "rates").glob("mild-seed-1-*/config.yaml"))
    said = capsys.readouterr().out
    assert "mad: The loss or its gradient stopped being finite" in said
    assert "mild: valid" in said
    assert run_stage.best_row("rates", tmp_path) == "mild"
    monkeypatch.setattr(stage_tables, "HERE", tmp_path)
    monkeypatch.setattr(stage_tables, "draw_curves", lambda name, runs: f"{list(runs)}.svg")
    table = stage_tables.stage_section(tmp_path / "rates")
    assert "| mad | diverged |" in table
    assert "['mild'].svg" in table


def test_the_gap_to_the_reference_is_that_of_the_same_tokens() -> None:
    def run(*perplexities: float) -> list[dict[str, Any]]:
        seeds = [[each - apart for each in perplexities] for apart in (1, -1)]
        return [
            {"curve": [{"tokens": 10**6 * (place + 1), "perplexity": each} for place, each in enumerate(seed)]}
            for seed in seeds
        ]

    rows = {"fair": run(200, 100, 90, 80), "deep": run(300, 150, 99, 84), "broken off": run(200, 90)}
    rows["a seed broken off"] = [*run(200, 110, 90, 88)[:1], *run(200, 110)[1:]]
    lines = stage_tables.gap_table(rows, "fair").splitlines()
    assert lines[2] == "| row | 2 M tokens | 4 M tokens |"
    assert lines[4:] == [
        "| deep | +50.0% | +5.0% |",
        "| broken off | -10.0% | – |",
        "| a seed broken off | +10.0% | – |",
    ]


def test_clipped_steps_are_counted_after_the_first_tenth(tuned: Path) -> None:
    run = finished_row("decisive", "R2", tuned)
    assert cell("clipped", run) == "–"
    clip = run["settings"]["optim"]["clip"]
    norms = {10: 9 * clip, 40: 2 * clip, 70: clip / 2, 90: clip / 2, 100: clip / 2}
    run["train_curve"] = [{"step": step, "gradient_norm": norm} for step, norm in norms.items()]
    assert cell("clipped", run) == "25%"
    assert claims.held_back("R2", [run]) == "; *R2* was clipped in 25% of its steps"
    run["train_curve"] = run["train_curve"][2:]
    assert claims.held_back("R2", [run]) == ""


def test_the_units_choices_stand_beside_the_best_schedule(tuned: Path) -> None:
    for path in [*(tuned / "tuning").glob("*.json"), *(tuned / "unit-choices").glob("*.json")]:
        run = json.loads(path.read_text())
        if "valid_perplexity" in run:
            path.write_text(json.dumps({**run, "valid_perplexity": 2 * run["valid_perplexity"] - 100}))
    lines = claims.choices_table(tuned).splitlines()
    first, second = (run_stage.read_stage("unit-choices")["rows"][place]["name"] for place in (0, 1))
    assert lines[2] == "| *the scaled baseline, rate 10* | 100.0 | +0.0% |"
    assert lines[3:5] == [f"| {first} | diverged | – |", f"| {second} | 104.0 | +4.0% |"]
    (tuned / "unit-choices" / "1.json").unlink()
    assert claims.choices_table(tuned).splitlines()[4] == f"| {second} | not run | – |"


def test_a_run_with_settings_that_its_stage_no_longer_takes_is_not_shown(tuned: Path) -> None:
    (tuned / "decisive").mkdir()
    for row in run_stage.rows_of("decisive", tuned):
        run = {"row": row.name, "settings": load_recipe(row.recipe, row.changes).to_plain()}
        (tuned / "decisive" / row.file).write_text(json.dumps(run))
    (tuned / "decisive" / "gone.json").write_text(json.dumps({**run, "row": "a row that the stage had once"}))
    assert len(stage_tables.read_rows(tuned / "decisive")) == 8
    best = tuned / "long-rates" / f"{BEST['long-rates']}.json"
    best.write_text(json.dumps({**json.loads(best.read_text()), "valid_perplexity": 1000.0}))
    assert not stage_tables.read_rows(tuned / "decisive")  # another rate is the best now
    best.unlink()
    assert len(stage_tables.read_rows(tuned / "decisive")) == 8  # nobody knows yet


def test_the_tables_have_every_stage() -> None:
    assert sorted(stage_tables.COMPARISONS + stage_tables.SEARCHES) == STAGES


def test_every_pair_of_a_claim_is_of_rows_that_a_stage_has() -> None:
    for claim in yaml.safe_load((RESULTS / "claims.yaml").read_text()):
        for pair in claim["pairs"]:
            names = {row["name"] for row in run_stage.read_stage(pair["stage"])["rows"]}
            assert {pair["row"], pair["against"]} <= names, claim["says"]
            assert pair.keys() <= {"stage", "row", "against", "no_worse", "but", "not_judged", "in_short"}


def test_a_claim_is_judged_by_the_difference_of_seeds(tuned: Path) -> None:
    def keep(stage: str, name: str, **facts: float) -> None:
        (tuned / stage).mkdir(exist_ok=True)
        run = {**finished_row(stage, name, tuned, **facts), "row": name}
        (tuned / stage / f"{name}-{facts['seed']}.json").write_text(json.dumps(run))

    for stage in ("tuning", "unit-choices"):
        for path in (tuned / stage).glob("*.json"):
            path.write_text(json.dumps({"test_perplexity": 99.0, **json.loads(path.read_text())}))
    keep("decisive", "R2", seed=1, test_perplexity=90.0, valid_perplexity=95.0)
    keep("decisive", "R3", seed=1, test_perplexity=80.0, valid_perplexity=81.0)
    assert table_rows(tuned)["R3", "R2"] == ["-14.7%", "-11.1%", "-8.2%", "no row has two seeds to judge by"]
    assert ("R3", "R2 scaled") not in table_rows(tuned)
    assert "Deeper is better with a table of one width: 3 of 3 pairs of rows." in claims.claims_table(tuned)
    keep("decisive", "R3", seed=2, test_perplexity=84.0, valid_perplexity=81.0)  # seeds are 5 % apart
    assert table_rows(tuned)["R3", "R2"] == ["-14.7%", "-8.9%", "-8.2%", "within seed noise"]
    keep("decisive", "R2 scaled", seed=1, test_perplexity=70.0, valid_perplexity=81.0)
    assert table_rows(tuned)["R3", "R2 scaled"] == ["+0.0%", "+17.1%", "–", "no, the opposite"]
    keep("decisive", "R2 and a projection", seed=1, test_perplexity=100.0, valid_perplexity=100.0)
    assert table_rows(tuned)["R3", "R2 and a projection"][-1] == "yes"
    assert "5.0%" in claims.claims_table(tuned)
    in_short = claims.claims_table(tuned, in_short=True)
    assert "| R3 | R2 scaled | +0.0% | +17.1% | – | no, the opposite |" in in_short
    assert "| R2 and a projection |" not in in_short
    assert "- DeFINE is better than an adaptive table: 4 of 6 pairs of rows." in in_short
    assert "- DeFINE is better than an adaptive table: 22 of 25 pairs of rows." in claims.claims_table(tuned)
    keep("decisive", "R2", seed=1, test_perplexity=120.0, valid_perplexity=95.0)
    assert table_rows(tuned)["R3", "R2"][-1] == "yes, but R2 is not scaled"
    for name in ("HGT", "linear"):
        keep("ablation", name, seed=1, test_perplexity=100.0, valid_perplexity=100.0)
    assert "| +0.0% | +0.0% | -0.7% | not judged: linear has the skip connection |" in claims.claims_table(tuned)
    broken = tuned / "decisive" / "R2-1.json"
    broken.write_text(json.dumps({**json.loads(broken.read_text()), "diverged": "at once"}))
    assert table_rows(tuned)["R3", "R2"] == ["diverged"] * 4
    assert [claims.verdict(test, True, 0.001) for test in (0.009, -0.02, 0.02)] == ["yes", "yes", "no"]
    assert [claims.verdict(test, True, 0.02) for test in (0.039, 0.041)] == ["yes", "no"]
    broken = tuned / "decisive" / "R3-2.json"
    broken.write_text(json.dumps({**json.loads(broken.read_text()), "diverged": "at once"}))
    assert "no row has run with two seeds yet" in claims.claims_table(tuned)


def test_a_pair_is_judged_as_it_says_and_beside_how_often_its_rows_were_clipped(tuned: Path) -> None:
    clipped = {"train_curve": [{"step": 100, "gradient_norm": 9.0}]}
    rows = {
        name: [finished_row("decisive", name, tuned, test_perplexity=test, **clipped)]
        for name, test in (("R3", 60.3), ("R2", 60.0))
    }
    pair = {"row": "R3", "against": "R2"}
    often = "; *R3* was clipped in 100% of its steps; *R2* was clipped in 100% of its steps"
    assert claims.pair_cells(pair, rows, 0.001)[-1] == f"no, the opposite{often}"
    assert claims.pair_cells({**pair, "no_worse": True}, rows, 0.001)[-1] == f"yes{often}"


def table_rows(results: Path) -> dict[tuple[str, str], list[str]]:
    """What the table of claims says of pairs of the decisive stage."""
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in claims.claims_table(results).splitlines()]
    return {(row[2], row[3]): row[4:] for row in found if len(row) == 8 and row[1] == "`decisive`"}


def test_a_row_of_which_one_seed_diverged_has_no_numbers_and_is_no_reference(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script_module in (run_stage, stage_tables):
        monkeypatch.setattr(script_module, "HERE", tmp_path)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "_schedule.yaml").write_text("optim: {lr: 1}\n")
    stage = {"title": "Seeds", "steps": 4, "common": TINY, "reference": "half mad"}
    rows = [{"name": "half mad", "recipe": "table1a/r2", "seeds": [1, 2]}, {"name": "mild", "recipe": "table1a/r2"}]
    rows[1]["data"] = {"max_size": 50}
    (tmp_path / "stages" / "seeds.yaml").write_text(json.dumps({**stage, "rows": rows}))
    arguments = ["run_stage.py", "seeds", "--data", str(corpus), "--out", str(tmp_path), "--runs", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--seconds", "0"])
    run_stage.main()
    assert not (tmp_path / "seeds").exists()
    monkeypatch.setattr(sys, "argv", arguments)
    run_stage.main()
    mild = json.loads((tmp_path / "seeds" / "mild-seed-1.json").read_text())
    assert mild["data"]["vocabulary_size"] == 50
    (tmp_path / "seeds" / "half-mad-seed-2.json").write_text(
        json.dumps({**mild, "row": "half mad", "diverged": "at once"})
    )
    monkeypatch.setattr(stage_tables, "draw_curves", lambda name, runs: f"{list(runs)}.svg")
    table = stage_tables.stage_section(tmp_path / "seeds")
    assert "| half mad | diverged |" in table
    assert "['mild'].svg" in table
    (tmp_path / "seeds" / "mild-seed-1.json").write_text("{")
    for read in (lambda: run_stage.best_row("seeds", tmp_path), lambda: stage_tables.stage_section(tmp_path / "seeds")):
        with pytest.raises(UserError, match=r"mild-seed-1\.json is not valid JSON"):
            read()
