"""What is counted of a drill: cases, refusals, and whatever must never happen."""

from __future__ import annotations

import resource
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_SECONDS = 20.0
MOST_BYTES = 500 << 20


class Watch:
    def __init__(self, what: str) -> None:
        self.what, self.cases, self.refusals = what, 0, 0
        self.failures: list[str] = []
        self.slowest, self.largest = 0.0, 0
        self.kinds: Counter[str] = Counter()
        self._case = ""

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case; whatever it raises, and does not refuse in a sentence of its own, is a failure."""
        self._case, self.cases = name, self.cases + 1
        self.kinds[name.split(",")[0]] += 1
        began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            yield
        except Exception:
            self.fail(traceback.format_exc(limit=-6))
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
        self.failures.append(f"{self._case}: {what}")

    def row(self) -> list[str]:
        return [
            self.what,
            f"{self.cases:,}",
            f"{self.refusals:,}",
            f"{len(self.failures):,}",
            f"{self.slowest:.1f} s",
            f"{self.largest / 2**20:,.0f} MiB",
        ]
