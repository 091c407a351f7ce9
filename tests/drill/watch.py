"""What is counted of a drill: cases, refusals, and whatever must never happen."""

from __future__ import annotations

import resource
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST_SECONDS = 20.0
HANGS_AFTER = 120
"""Seconds; a case is ended then."""
MOST_BYTES = 500 << 20
LONGEST_FAILURE = 3000
"""Characters."""


class Watch:
    def __init__(self) -> None:
        self.cases, self.refusals = 0, 0
        self.failures: list[str] = []
        self.slowest, self.largest = 0.0, 0
        self._case = ""

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case; whatever it raises, and does not refuse in a sentence of its own, is a failure."""
        self._case, self.cases = name, self.cases + 1
        began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = signal.signal(signal.SIGALRM, _end)
        signal.alarm(HANGS_AFTER)
        try:
            yield
        except Exception:
            self.fail(traceback.format_exc(limit=-6))
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        took = time.monotonic() - began
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
        self.slowest, self.largest = max(self.slowest, took), max(self.largest, more)
        if took > LONGEST_SECONDS:
            self.fail(f"took {took:.0f} s")
        if more > MOST_BYTES:
            self.fail(f"took {more >> 20} MiB")

    def refused(self, sentence: str) -> None:
        self.refusals += 1
        if "\n" in sentence or any(ord(sign) < 32 or 127 <= ord(sign) < 160 for sign in sentence):
            self.fail(f"a refusal that is no plain sentence: {sentence!r}")

    def fail(self, what: str) -> None:
        self.failures.append(f"{self._case:.400}: {what[-LONGEST_FAILURE:]}")

    def add(self, other: Watch) -> None:
        self.cases += other.cases
        self.refusals += other.refusals
        self.failures += other.failures
        self.slowest, self.largest = max(self.slowest, other.slowest), max(self.largest, other.largest)

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Watch:
        watch = cls()
        vars(watch).update(facts)
        return watch


def _end(*_: object) -> None:
    raise TimeoutError(f"a hang of {HANGS_AFTER} s")
