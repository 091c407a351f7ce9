"""The shape that all benchmarks share: rows, goals, records and the command."""

import json
import math
import runpy
import time
import weakref
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.measuring import (
    Contestant,
    Goal,
    Group,
    Prepared,
    Row,
    Setting,
    measure,
    milliseconds,
    share_of_time,
    times_as_long,
    times_faster,
    times_the_memory,
)
from benchmarks.records import Benchmark, append_record, run, run_group

from benchmarks import measuring
from benchmarks import recorded as recordings
from torchdefine.errors import UserError

SETTING = Setting(torch.device("cpu"), small=True, repeats=4)


def rows_in(path: Path) -> list[dict]:
    """As what makes the tables reads them."""
    file = Path(__file__).parent.parent.parent / "results" / "benchmark_tables.py"
    return runpy.run_path(str(file))["read"](path)


def row(ms: float, peak: float | None = None) -> Row:
    return Row(ms, ms, ms, ms, ms, 3, 1, peak)


def sleeper(name: str, seconds: float, lacks: str = "") -> Contestant:
    return Contestant(name, lambda: Prepared(lambda: time.sleep(seconds), lambda: {"slept": seconds}), lacks)


def test_a_row_has_the_order_of_its_numbers_and_the_facts() -> None:
    (found,) = measure([sleeper("a", 0.002)], SETTING)
    assert 2 <= found.least_ms <= found.q1_ms <= found.ms <= found.q3_ms <= found.most_ms
    assert found.repeats == SETTING.repeats
    assert found.facts == {"slept": 0.002}


def test_quick_work_is_called_more_often_for_one_number() -> None:
    calls = []
    (found,) = measure([Contestant("quick", lambda: Prepared(lambda: calls.append(1)))], SETTING)
    assert found.calls_at_once > 10
    assert len(calls) == 3 + SETTING.repeats * found.calls_at_once


def test_long_work_is_warmed_once_and_every_later_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LONG_SECONDS", 0.002)
    calls: list[int] = []
    slow = Contestant("slow", lambda: Prepared(lambda: (calls.append(1), time.sleep(0.012))))
    (found,) = measure([slow], SETTING)
    assert found.repeats == SETTING.repeats == len(calls) - 1
    assert found.least_ms >= 12


def test_a_recording_is_made_by_the_first_call_and_keeps_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weights:
        def work(self) -> str:
            return "worked"

    made: list[object] = []
    monkeypatch.setattr(recordings, "_recording", lambda work: made.append(weakref.ref(work.__self__)) or work)
    call = recordings.recorded(Weights().work)
    assert not made
    assert call() == call() == "worked"
    assert len(made) == 1
    assert made[0]() is not None


def test_contestants_that_take_turns_do() -> None:
    order: list[str] = []

    def contestant(name: str) -> Contestant:
        return Contestant(name, lambda: Prepared(lambda: (time.sleep(0.011), order.append(name))))

    measure([contestant("a"), contestant("b")], SETTING)
    assert order[-4:] == ["a", "b", "a", "b"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts a process's peak memory")
def test_peak_memory_counts_what_was_needed_for_a_while() -> None:
    def hungry() -> None:
        torch.ones(16 << 20)  # 64 MiB

    (found,) = measure([Contestant("hungry", lambda: Prepared(hungry))], SETTING)
    if found.peak_mib is not None:
        assert 50 < found.peak_mib < 200


def test_goals_are_judged_by_their_rows() -> None:
    rows = {"slow": row(10, 100), "fast": row(2, 50)}
    judged = {
        times_faster("fast", "slow", 4): (5, True),
        times_faster("fast", "slow", 6): (5, False),
        milliseconds("fast", 2): (2, True),
        share_of_time("slow", "fast", 0.02): (4, False),
        times_as_long("fast", "slow", 0.25): (0.2, True),
        times_the_memory("fast", "slow", 1.0): (0.5, True),
    }
    for goal, (value, met) in judged.items():
        assert goal.value(rows) == pytest.approx(value)
        assert goal.met(goal.value(rows)) is met
    assert math.isnan(times_the_memory("fast", "other", 1.0).value({"fast": row(1), "other": row(1)}))


def test_a_group_says_what_was_not_run_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> Prepared:
        raise RuntimeError("out of luck\nand a long story")

    contestants = [sleeper("a", 0.001), sleeper("b", 0.001, "it needs a moon"), Contestant("c", fail)]
    everywhere = Goal("never", lambda rows: rows["a"].ms, 0.0, at_most=True, gpu_only=False)
    unmeasured = Goal("unmeasured", lambda rows: rows["b"].ms, 1.0, gpu_only=False)
    group = run_group(Group("g", contestants, [everywhere, unmeasured, times_faster("a", "a", 1)]), SETTING)
    assert list(group["rows"]) == ["a"]
    assert group["not_run"] == {"b": "it needs a moon", "c": "RuntimeError: out of luck"}
    assert [goal["met"] for goal in group["goals"]] == [False, None]  # the third is for GPUs
    said = capsys.readouterr().out
    assert "b: not run, it needs a moon" in said
    assert "missed" in said


def test_contestants_are_chosen_by_their_group_s_name_or_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    groups = [Group(name, [sleeper("a", 0.001), sleeper("b", 0.001)]) for name in ("one", "two")]
    benchmark = Benchmark("little", "sleeps a little", lambda setting: iter(groups))
    assert list(run(benchmark, SETTING, only="two")["groups"]) == ["two"]
    found = run(benchmark, SETTING, only="one: b")["groups"]
    assert {name: (list(group["rows"]), group["reference"]) for name, group in found.items()} == {"one": (["b"], "a")}
    with pytest.raises(UserError, match="little has no contestant with 'c'"):
        run(benchmark, SETTING, only="c")


def test_records_are_appended_and_read_again(tmp_path: Path) -> None:
    benchmark = Benchmark("little", "sleeps a little", lambda setting: iter([Group("g", [sleeper("a", 0.001)])]))
    for _ in range(2):
        path = append_record(tmp_path, run(benchmark, SETTING))
    path.write_text(path.read_text() + json.dumps({"date": "of another format"}) + "\n")
    first, second = rows_in(path)
    assert first["benchmark"] == second["benchmark"] == "little"
    assert {"versions", "hardware", "commit", "date"} <= first.keys()
    assert Row(**first["groups"]["g"]["rows"]["a"]).facts == {"slept": 0.001}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stps"], "The benchmark 'stps' is unknown: did you mean 'steps'?"),
        (["--repeats", "1"], "needs at least 2"),
        (["--device", "abacus"], "The device 'abacus' is unknown"),
        (["--device", "meta"], "no clock for the device 'meta'"),
    ],
)
def test_a_misused_command_says_so(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "rows")]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert len(complaint.splitlines()) == 1
    assert not (tmp_path / "rows").exists()


def test_the_command_lists_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)
    assert main(["attention", "--small", "--repeats", "2", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (record,) = rows_in(tmp_path / "attention.jsonl")
    (group,) = record["groups"].values()
    assert set(group["rows"]) == {"textbook", "ours"}
