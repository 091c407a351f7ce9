"""A benchmark's groups run through, said aloud line by line, and kept as one dated row of JSON."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import Contestant, Goal, Group, Rows, Setting, measure
from torchdefine.errors import UserError
from torchdefine.files import write_text
from torchdefine.run.environment import describe_environment

FORMAT, FORMAT_VERSION = "torchdefine benchmark", 1


@dataclass(frozen=True)
class Benchmark:
    name: str
    description: str
    groups: Callable[[Setting], Iterator[Group]]


def run(benchmark: Benchmark, setting: Setting, only: str = "") -> dict[str, Any]:
    """Measure all groups; the record of it. ``only``: contestants whose "group: name" has this in it."""
    print(f"{benchmark.name}: {benchmark.description}", flush=True)
    groups = {group.name: found for group in benchmark.groups(setting) if (found := run_group(group, setting, only))}
    if only and not groups:
        raise UserError(f"{benchmark.name} has no contestant with {only!r} in its group's name or its own.")
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "benchmark": benchmark.name,
        "date": datetime.date.today().isoformat(),
        "small": setting.small,
        "text": Path(setting.data).name,
        **describe_environment(setting.device),
        "groups": groups,
    }


def run_group(group: Group, setting: Setting, only: str = "") -> dict[str, Any]:
    """What was measured of a group; nothing if ``only`` leaves no contestant."""
    chosen = [contestant for contestant in group.contestants if only in f"{group.name}: {contestant.name}"]
    if not chosen:
        return {}
    print(f"\n  {group.name}" + (f" ({group.note})" if group.note else ""), flush=True)
    rows: Rows = {}
    not_run = {contestant.name: contestant.lacks for contestant in chosen if contestant.lacks}
    able = [contestant for contestant in chosen if not contestant.lacks]
    for together in [able] if group.taking_turns else [[contestant] for contestant in able]:
        reason = _measured(together, setting, rows)
        for contestant in together:
            if reason:
                not_run[contestant.name] = reason
            else:
                print(f"    {contestant.name}: {_line(rows, contestant.name)}", flush=True)
    for name, reason in not_run.items():
        print(f"    {name}: not run, {reason}", flush=True)
    goals = [said for goal in group.goals if (said := _judged(goal, rows, setting)) is not None]
    return {
        "note": group.note,
        "reference": group.contestants[0].name,
        "rows": {name: asdict(row) for name, row in rows.items()},
        "not_run": not_run,
        "goals": goals,
    }


def _measured(contestants: list[Contestant], setting: Setting, rows: Rows) -> str:
    """Measure into ``rows``; or the reason why that could not be done."""
    try:
        found = measure(contestants, setting)
    except (RuntimeError, ImportError) as error:  # out of memory, a compiler that is not there
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    rows.update({contestant.name: row for contestant, row in zip(contestants, found, strict=True)})
    return ""


def _line(rows: Rows, name: str) -> str:
    row, first = rows[name], next(iter(rows.values()))
    memory = "" if row.peak_mib is None else f", peak {row.peak_mib:,.0f} MiB"
    facts = "".join(f", {key} {value}" for key, value in row.facts.items())
    return (
        f"{first.ms / row.ms:.2f}× as fast, {row.ms:.3f} ms (quartiles {row.q1_ms:.3f}–{row.q3_ms:.3f}, "
        f"all {row.least_ms:.3f}–{row.most_ms:.3f}, {row.repeats} × {row.calls_at_once} calls){memory}{facts}"
    )


def _judged(goal: Goal, rows: Rows, setting: Setting) -> dict[str, Any] | None:
    if goal.gpu_only and not setting.on_gpu:
        return None
    try:
        value = goal.value(rows)
    except KeyError:
        value = math.nan
    if math.isnan(value):
        print(f"    goal {goal}: not measured", flush=True)
        return {"goal": str(goal), "value": None, "met": None}
    met = goal.met(value)
    print(f"    goal {goal}: {'met' if met else 'missed'} with {value:.3f}", flush=True)
    return {"goal": str(goal), "value": value, "met": met}


def append_record(folder: Path, record: dict[str, Any]) -> Path:
    """Add a row to the benchmark's file, which is written anew as a whole."""
    path = folder / f"{record['benchmark']}.jsonl"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, before + json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    return path
