"""Look-up, growth, the demo's profile and AWD-LSTM at tiny size, and the page that is made of rows."""

import importlib.util
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.measuring import Setting
from benchmarks.records import Benchmark, append_record, run

from benchmarks import awd_lstm, demo_profile, growth, look_up, own_loop, shrunk_tables
from tests.benchmarks.test_steps import tiny

SETTING = Setting(torch.device("cpu"), small=True, repeats=2)
ROOT = Path(__file__).parent.parent.parent


def test_every_look_up_gives_the_vectors_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_up, "SMALL_SIZE", 600)
    monkeypatch.setattr(look_up, "TOKENS", 280)
    monkeypatch.setattr(look_up, "ENCODER_SIZE", 700)
    few, group, encoder, every = look_up.groups(SETTING)
    vectors = {contestant.name: contestant.prepare().work() for contestant in group.contestants if not contestant.lacks}
    exact = vectors["computed by the unit"]
    for name in ("embedding.cached()", "a cache file"):
        torch.testing.assert_close(vectors[name], exact, rtol=1e-5, atol=1e-5)
    scale, fused = exact.square().mean(), [("fbgemm's rows of 8 bits", 1e-3), ("fbgemm's rows of 4 bits", 0.05)]
    for name, error in (("float16", 1e-5), ("SVD of rank 128", 0.6), *fused):
        assert (vectors[name] - exact).square().mean() < error * scale, name
    assert all(found.shape == exact.shape for found in vectors.values())
    assert few.contestants[0].prepare().work().shape == (32, look_up.WIDTH)
    finished = [contestant.prepare().work() for contestant in every.contestants]
    torch.testing.assert_close(finished[0], finished[1], rtol=1e-5, atol=1e-5)
    assert [contestant.name for contestant in encoder.contestants][:2] == ["nn.Embedding", "bits"]


def test_growth_has_a_row_for_every_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point = growth.SMALL._replace(vocabulary=500, shape=(2, 8))
    axes = {
        "vocabulary": [point, point._replace(vocabulary=700)],
        "depth": [point._replace(depth=1), point],
        "tokens": [point, point._replace(shape=(4, 8))],
    }
    monkeypatch.setattr(growth, "SMALL_AXES", axes)
    record = run(growth.BENCHMARK, SETTING)
    rows = record["groups"]["vocabulary, forward and backward"]["rows"]
    assert [(r["facts"]["line"], r["facts"]["at"]) for r in rows.values()][-1] == ("DeFINE", 700)
    assert len(record["groups"]["depth, forward"]["rows"]) == 4
    page = written_page(record, tmp_path)
    assert "![Growth](../figures/growth-" in page
    assert len(list((tmp_path / "figures").glob("growth-*.svg"))) == 1


def test_shrunk_tables_tell_what_they_took_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrunk_tables, "MODELS", {"small": (64 * 300, 64)})
    monkeypatch.setattr(shrunk_tables, "TOKENS", 100)
    record = run(Benchmark("shrunk", "a table in few bits", partial(shrunk_tables.groups, "small")), SETTING)
    assert list(record["groups"]) == ["small, look-up", "small, output layer"]
    facts = record["groups"]["small, look-up"]["rows"]["bits"]["facts"]
    assert 0.5 * 300 * 16 * 3 / 8 < facts["stored MiB"] * 2**20 <= 300 * 16 * 3 / 8 + 6_000
    assert facts["seconds to make"] > 0
    module, packed, _ = shrunk_tables.made(300, 16, torch.device("cpu"))
    hidden = torch.randn(2, 16)
    torch.testing.assert_close(packed.logits(hidden), hidden @ packed(torch.arange(300)).T, rtol=1e-4, atol=1e-5)
    assert module.shape == (300, 16)


def test_a_profile_is_drawn(tmp_path: Path) -> None:
    newest = (ROOT / "results" / "benchmarks" / "step-profile.jsonl").read_text().splitlines()[-1]
    record = json.loads(newest)
    page = written_page(record, tmp_path)
    assert "![Steps by kind of kernel](../figures/step-profile-" in page
    (picture,) = (tmp_path / "figures").glob("step-profile-*.svg")
    drawn = picture.read_text()
    assert all(name in drawn for group in record["groups"].values() for name in group["rows"])
    assert "matrix products" in drawn


def test_growth_leaves_out_what_does_not_fit() -> None:
    huge = growth.Point(vocabulary=10**12)
    assert growth.lacks_memory("nn.Embedding", huge, SETTING).startswith("it needs about")
    assert growth.lacks_memory("DeFINE", growth.SMALL, SETTING) == ""


def test_shares_of_the_demo_add_up_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_profile, "ROUNDS", 2)
    monkeypatch.setattr(demo_profile, "STEPS_A_ROUND", 1)
    prepared = demo_profile.prepared("demo/adaptive-define", SETTING)
    prepared.work()
    facts = prepared.facts()
    shares = facts["shares"]
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert shares["matrix products"] > 0.05
    assert shares["LSTM"] > 0.05
    assert facts["undisturbed"] > 0  # how much more depends on what else the machine does


def test_kernels_have_a_kind() -> None:
    kinds = {
        "aten::mkldnn_rnn_layer_backward": "LSTM",
        "aten::addmm_": "matrix products",
        "aten::_fused_adam_": "optimiser",
        "aten::embedding_dense_backward": "tables",
        "aten::copy_": "other kernels",
        "AddmmBackward0": "other kernels",
        "autograd::engine::evaluate_function: MmBackward0": "other kernels",
        "_TotalLoss": "softmax and loss",
    }
    assert {kernel: demo_profile.kind_of(kernel) for kernel in kinds} == kinds


def test_awd_lstm_keeps_its_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awd_lstm, "FAMILY", tiny("AWD-LSTM"))
    (group,) = awd_lstm.groups(SETTING)
    for contestant in group.contestants:
        if not contestant.lacks:
            contestant.prepare().work()
    on_gpu = replace(SETTING, device=torch.device("cuda"))
    place = awd_lstm.FAMILY.place(SETTING)
    names = [contestant.name for contestant in awd_lstm.contestants(on_gpu, place)]
    assert names[:4] == [f"plain loop, {precision}" for precision in ("tf32", "fp32", "bf16", "fp16")]
    assert names[4:6] == ["ours, tf32, kernel by kernel", "ours, tf32, recorded"]
    assert names[-1] == "ours with DeFINE, bf16, recorded"
    assert len(names) == 11


def written_page(record: dict, folder: Path) -> str:
    tables = page_maker()
    tables.HERE, tables.ROWS, tables.FIGURES = folder, folder / "benchmarks", folder / "figures"
    append_record(tables.ROWS, record)
    tables.main()
    return (tables.ROWS / "README.md").read_text()


def page_maker(name: str = "benchmark_tables") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "results" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_newest_row_of_each_hardware(tmp_path: Path) -> None:
    benchmark = Benchmark("little", "does little", lambda setting: iter([]))
    record = run(benchmark, SETTING)
    row = {"ms": 2.0, "q1_ms": 1.5, "q3_ms": 2.5, "peak_mib": None, "facts": {"parameters": 2_000_000}}
    group = {
        "note": "a note",
        "reference": "a",
        "rows": {"a": row, "b": {**row, "ms": 1.0}},
        "not_run": {"c": "it needs a moon"},
        "goals": [{"goal": "b: ms ≤ 1", "value": 1.0, "met": True}],
    }
    old, new = ({**record, "date": date, "groups": {"g": group}} for date in ("2026-01-01", "2026-02-02"))
    other = {**old, "hardware": {**record["hardware"], "gpu": "Abacus 9"}}
    for row in (old, other):
        append_record(tmp_path / "benchmarks", row)
    page = written_page(new, tmp_path)
    assert page.count("2026-02-02") == page.count("2026-01-01") == page.count("Abacus 9") == 1
    assert "| b | 2.00 | 1.000 | 1.500–2.500 | – | 2.00 M parameters |" in page
    assert "Goal: b: ms ≤ 1: **met** with 1.000." in page
    assert "Not run: c (it needs a moon)." in page


def test_parts_of_a_benchmark_are_put_together_and_uncounted_peaks_left_out(tmp_path: Path) -> None:
    """A GPU's memory was counted wrongly for recordings until a day."""
    record = run(Benchmark("output", "does little", lambda setting: iter([])), SETTING)
    row = {"ms": 2.0, "q1_ms": 1.5, "q3_ms": 2.5, "peak_mib": 64.0, "facts": {}}
    goal = {"goal": "b, recorded: times the peak memory of a ≤ 1", "value": 0.1, "met": True}
    parts = {"a": [], "b, recorded": [goal]}
    for name, goals in parts.items():
        group = {"note": "a note", "reference": "a", "rows": {name: row}, "not_run": {}, "goals": goals}
        part = {**record, "date": "2026-11-19", "groups": {"g": group}}
        append_record(tmp_path / "benchmarks", {**part, "hardware": {**record["hardware"], "gpu": "Abacus 9"}})
        append_record(tmp_path / "benchmarks", part)
    page = written_page({**record, "date": "2026-11-20", "commit": "another", "groups": {}}, tmp_path)
    assert page.count("2026-11-19, ") == 1  # the newest on the CPU has another commit
    assert "| a | 1.00 | 2.000 | 1.500–2.500 | 64 |  |" in page
    assert "| b, CUDA graph | 1.00 | 2.000 | 1.500–2.500 | – |  |" in page
    assert "times the peak memory of a ≤ 1: not measured." in page


def test_the_rows_of_this_checkout_can_be_read() -> None:
    files = list((ROOT / "results" / "benchmarks").glob("*.jsonl"))
    rows = [(path, json.loads(line)) for path in files for line in path.read_text().splitlines()]
    assert {path for path, _ in rows} == set(files) != set()
    for path, row in rows:
        assert row["format"] == "torchdefine benchmark", path


def test_the_front_page_says_what_the_newest_steps_on_a_gpu_were(tmp_path: Path) -> None:
    def row(ms: float, parameters: int = 2_000_000) -> dict[str, Any]:
        return {"ms": ms, "q1_ms": ms, "q3_ms": ms, "peak_mib": 1.0, "facts": {"parameters": parameters}}

    rows = {"plain loop, a/b": row(20.0), "a/b, recorded": row(8.0), "a/b-define, recorded": row(8.2)}
    group = {"note": "ids 6×15 and 6×15, 100 types", "reference": "plain loop, a/b", "rows": rows}
    record = {"hardware": {"gpu": "A GPU", "cpu_threads": 1}, "small": False, "groups": {"family": group}}
    tables = page_maker()
    tables.HERE = tmp_path / "results"
    (tmp_path / "README.md").write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    tables.write_front_page([record])
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("before\n<!-- speed -->\nTimes of whole training steps on one A GPU")
    assert "| `a/b` | 2.0 M | 6×15 | 20.0 ms | 8.0 ms | 2.5 | +2.5% |" in page
    assert page.endswith("<!-- /speed -->\nafter\n")
    rows["plain loop, a/b"] = row(20.0, 3_000_000)
    rows["plain loop, its model compiled"] = row(12.0)
    tables.write_front_page([record])
    assert "| 20.0 ms (3.0 M) | 12.0 ms | 8.0 ms | 2.5 | 1.5 |" in (tmp_path / "README.md").read_text()


def steps_record(gpu: bool, compiled_ms: float | None) -> dict[str, Any]:
    """A row of `steps` with one family, as far as the front page reads it."""
    ways = ["kernel by kernel", *["recorded"] * gpu]
    rows = {"plain loop, with": {"ms": 30.0, "facts": {"parameters": 3_000_000}}}
    if compiled_ms is not None:
        rows["plain loop, its model compiled"] = {"ms": compiled_ms, "facts": {"parameters": 3_000_000}}
    for recipe, ms in (("without", 10.0), ("with", 12.0)):
        rows |= {f"{recipe}, {way}": {"ms": ms, "facts": {"parameters": 2_000_000}} for way in ways}
    group = {"note": "ids 4×32 and 4×32, 8,000 types", "reference": "plain loop, with", "rows": rows}
    hardware = {"cpu": "a CPU", "cpu_threads": 2, **({"gpu": "a GPU"} if gpu else {})}
    return {"small": not gpu, "hardware": hardware, "groups": {"family": group}}


def test_the_front_page_says_where_compiled_torch_was_not_run_and_where_it_is_faster() -> None:
    tables = page_maker()
    of_gpu, of_cpu = steps_record(gpu=True, compiled_ms=None), steps_record(gpu=False, compiled_ms=11.0)
    assert "torch.compile was not run on this GPU." in tables.said_of_gpu(of_gpu)
    assert (
        tables.step_table(of_gpu).splitlines()[2]
        == "| `with` | 2.0 M | 4×32 | 30.0 ms (3.0 M) | 12.0 ms | 2.5 | +20.0% |"
    )
    assert "Compiled torch is faster than ours for `with`." in tables.said_of_cpu(of_cpu)
    assert (
        tables.step_table(of_cpu)
        .splitlines()[2]
        .endswith("| 30.0 ms (3.0 M) | 11.0 ms | 12.0 ms | 2.5 | 0.9 | +20.0% |")
    )
    assert "faster than ours" not in tables.said_of_cpu(steps_record(gpu=False, compiled_ms=13.0))


def test_a_loop_of_ones_own_learns_with_every_table() -> None:
    (group,) = own_loop.groups(SETTING)
    for contestant in group.contestants:
        if not contestant.lacks:
            prepared = contestant.prepare()
            prepared.work()
            assert prepared.facts()["parameters"] > 0
    names = [contestant.name for contestant in group.contestants if contestant.lacks]
    assert names == ["nn.Embedding, compiled", "table and linear, compiled", "DeFINE, compiled"]


def test_the_loop_of_one_s_own_is_shown_with_its_numbers() -> None:
    rows = {"DeFINE": {"ms": 2.0, "facts": {"parameters": 760_000}}, "other": {"ms": 3.0, "facts": {"parameters": 0}}}
    rows["DeFINE, compiled"] = {**rows["DeFINE"], "ms": 1.5}
    record = {"hardware": {"cpu": "A CPU", "cpu_threads": 2}, "small": False, "commit": "0123456789abcdef"}
    record["groups"] = {"training step": {"note": "few ids", "rows": rows}}
    tables = page_maker("own_loop_table")
    lines = tables.page_part([record]).splitlines()
    assert lines[0] == "A training step of this loop on A CPU, 2 threads: few ids. Medians, commit 0123456789ab."
    assert lines[-2:] == ["| DeFINE | 0.76 M | 2.00 ms | 1.50 ms |", "| other | 0.00 M | 3.00 ms | not run |"]
    assert tables.page_part([]) == tables.page_part([{**record, "small": True}]) == "Not yet run."
