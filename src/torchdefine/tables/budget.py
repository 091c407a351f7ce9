"""Into how many bytes a table must fit, as a number or as text such as "1.5MB"."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from torchdefine.errors import UserError
from torchdefine.tables.compact_table import table_bytes
from torchdefine.tables.rows import Rows

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_COUNTS = {"": 4, "k": 4 * 10**3, "m": 4 * 10**6, "b": 4 * 10**9}


@dataclass(frozen=True)
class Budget:
    """At most ``bytes``; with ``floats_only`` nothing is packed, so that parameters are saved and not only bytes."""

    bytes: int
    floats_only: bool = False

    @classmethod
    def of(cls, size: int | str | Budget) -> Budget:
        """From bytes (the int 1500000), a size ("1.5MB", "512 KiB", "900B") or float32 numbers ("4M parameters")."""
        if isinstance(size, Budget):
            return size
        read = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*?)\s*(parameters|params)?", str(size).strip().lower())
        counted = read is not None and read[3] is not None
        if read and not counted and not read[2] and isinstance(size, str):
            raise UserError(f"The budget {size!r} has no unit: write {size}MB, {size}KB, or {size}M parameters.")
        units = _COUNTS if counted else _UNITS
        bytes_ = float(read[1]) * units.get(read[2], math.nan) if read else math.nan
        if not 1 <= bytes_ < math.inf:  # float takes hundreds of digits for infinity
            raise UserError(f"The budget {size!r} is not a size: write it as 1.5MB, 512KiB, or 4M parameters.")
        return cls(int(bytes_), counted)

    def part(self, fraction: float) -> Budget:
        return Budget(int(self.bytes * fraction), self.floats_only)

    def fits(self, empty: Callable[[], Rows]) -> bool:
        """Whether a table of such rows is within the budget."""
        return table_bytes(empty) <= self.bytes

    def largest(self, highest: int, empty: Callable[[int], Rows]) -> int:
        """The largest size from 1 to ``highest`` at which a table of such rows fits; 0 where none does."""
        return bisect_right(range(1, highest + 1), self.bytes, key=lambda size: table_bytes(lambda: empty(size)))

    def __str__(self) -> str:
        if self.floats_only:
            return f"{self.bytes / 4e6:.3g} M parameters ({readable_bytes(self.bytes)} in float32)"
        return readable_bytes(self.bytes)


def readable_bytes(count: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} bytes"
