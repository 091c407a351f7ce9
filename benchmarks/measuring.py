"""Contestants measured one after another in one process, by one clock and on the same tensors.

A number is the mean of some calls that run back to back, as training makes them, between two moments at which the
device has nothing left to do; there are many such numbers, and the row has their median, quartiles and extremes.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

Work = Callable[[], object]
ENOUGH_SECONDS = 0.01
"""So long must the calls take that make one number; quicker work is called more often."""
MOST_CALLS_AT_ONCE = 50
FEWEST_REPEATS = 3
LONG_SECONDS = 10.0
"""A call that takes longer is warm enough after one, and the next one counts."""


@dataclass(frozen=True)
class Setting:
    """What all benchmarks are told."""

    device: torch.device
    small: bool = False
    """Shapes that two CPU cores can wait for."""
    repeats: int = 20
    data: str = "wikitext-2-shuffled"
    """The text that ids are taken from."""
    compile: bool = False
    """Whether to compile small shapes and on a CPU too, which takes minutes."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def most_seconds(self) -> float:
        """After so long a contestant's repeats are cut short; its row says how many there were."""
        return 1.0 if self.small else 20.0


class Prepared(NamedTuple):
    """A contestant that is ready to run."""

    work: Work
    facts: Callable[[], dict[str, Any]] = dict
    """Asked after the measurement; goes into the row."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered for the length of the measurement."""


@dataclass(frozen=True)
class Contestant:
    name: str
    prepare: Callable[[], Prepared]
    """Called just before the measurement, so that only one contestant is in memory at a time."""
    lacks: str = ""
    """Why it cannot run here; empty if it can."""


@dataclass(frozen=True)
class Row:
    """What was measured of a contestant; times in milliseconds a call."""

    ms: float
    q1_ms: float
    q3_ms: float
    least_ms: float
    most_ms: float
    repeats: int
    calls_at_once: int
    peak_mib: float | None
    """What it takes while it runs, its weights included, at most; None where nobody counts."""
    facts: dict[str, Any] = field(default_factory=dict)


Rows = dict[str, Row]


@dataclass(frozen=True)
class Goal:
    """A number made of rows, and what it should be."""

    what: str
    value: Callable[[Rows], float]
    bound: float
    at_most: bool = False
    gpu_only: bool = True

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{self.what} {'≤' if self.at_most else '≥'} {self.bound:g}"


@dataclass(frozen=True)
class Group:
    """Contestants that do the same work; the first is the reference of the ratios."""

    name: str
    contestants: list[Contestant]
    goals: list[Goal] = field(default_factory=list)
    note: str = ""
    taking_turns: bool = False
    """All are in memory at once and repeat in turns: for quick work of which small differences matter."""


def times_faster(who: str, than: str, at_least: float) -> Goal:
    return Goal(f"{who}: times faster than {than}", lambda rows: rows[than].ms / rows[who].ms, at_least)


def milliseconds(who: str, at_most: float, *, gpu_only: bool = True) -> Goal:
    return Goal(f"{who}: ms", lambda rows: rows[who].ms, at_most, at_most=True, gpu_only=gpu_only)


def share_of_time(who: str, without: str, at_most: float, *, gpu_only: bool = True) -> Goal:
    """How much longer one contestant takes than another, as a share of the other's time."""
    return Goal(
        f"{who}: share of time over {without}",
        lambda rows: rows[who].ms / rows[without].ms - 1,
        at_most,
        at_most=True,
        gpu_only=gpu_only,
    )


def times_as_long(who: str, than: str, at_most: float, *, gpu_only: bool = True) -> Goal:
    return Goal(
        f"{who}: times as long as {than}", lambda rows: rows[who].ms / rows[than].ms, at_most, True, gpu_only=gpu_only
    )


def times_the_memory(who: str, than: str, at_most: float) -> Goal:
    def ratio(rows: Rows) -> float:
        mine, others = rows[who].peak_mib, rows[than].peak_mib
        return mine / others if mine and others else math.nan

    return Goal(f"{who}: times the peak memory of {than}", ratio, at_most, at_most=True)


class Run:
    """A contestant that was prepared and is warm: ``repeat`` measures it once more, ``row`` says what was found."""

    def __init__(self, contestant: Contestant, setting: Setting) -> None:
        self.device = setting.device
        torch.manual_seed(0)
        memory = PeakMemory(self.device)
        self.prepared = contestant.prepare()
        memory.start()
        with self.prepared.around():
            for _ in range(5 if setting.on_gpu else 2):  # kernels are chosen, steps recorded, memories filled
                if self._seconds(1) > LONG_SECONDS:
                    break
            one = self._seconds(1)
        self.peak_mib = memory.peak_mib()
        wished = math.ceil(ENOUGH_SECONDS / max(one, 1e-9))
        self.calls_at_once = min(max(wished, 2 if setting.on_gpu else 1), MOST_CALLS_AT_ONCE)
        self.times: list[float] = [1e3 * one] if one > LONG_SECONDS else []

    def repeat(self) -> None:
        with self.prepared.around():
            self.times.append(1e3 * self._seconds(self.calls_at_once) / self.calls_at_once)

    def row(self) -> Row:
        q1, median, q3 = statistics.quantiles(self.times, method="inclusive")
        return Row(
            median,
            q1,
            q3,
            min(self.times),
            max(self.times),
            len(self.times),
            self.calls_at_once,
            self.peak_mib,
            self.prepared.facts(),
        )

    def _seconds(self, calls: int) -> float:
        _wait_for(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            self.prepared.work()
        _wait_for(self.device)
        return time.perf_counter() - start


def measure(contestants: list[Contestant], setting: Setting) -> list[Row]:
    """The contestants' rows; several take turns, so that whatever else the machine does meets all of them alike."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock modules complain of how they are used, and nobody can help it
        runs = [Run(contestant, setting) for contestant in contestants]
        started = time.perf_counter()
        while (count := min(len(run.times) for run in runs)) < setting.repeats:
            late = time.perf_counter() - started > setting.most_seconds * len(runs)
            if late and count >= FEWEST_REPEATS:
                break
            for run in runs:
                run.repeat()
        return [run.row() for run in runs]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """The most memory beyond what is taken now: a GPU's allocator counts it, and for a CPU the Linux kernel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self._before: float | None = torch.cuda.memory_allocated(device)
        else:
            _give_back_free_memory()
            self._before = _resident("VmRSS")

    def start(self) -> None:
        """Look from here on; what was needed only for a while before does not count."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _give_back_free_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._before = None

    def peak_mib(self) -> float | None:
        if self.device.type == "cuda":
            peak: float | None = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _resident("VmHWM")
        return None if peak is None or self._before is None else (peak - self._before) / 2**20


def _give_back_free_memory() -> None:
    """Let the C library return what it holds in reserve, which would hide what is allocated next."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def _resident(name: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
