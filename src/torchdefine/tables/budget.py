"""A size that a table may have: bytes, or parameters in float32."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from torchdefine.errors import UserError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Budget:
    """At most ``bytes``; with ``floats_only`` nothing is packed, so that parameters are saved and not only bytes."""

    bytes: int
    floats_only: bool = False

    @classmethod
    def of(cls, size: int | str | Budget) -> Budget:
        """From bytes (1500000), a size ("1.5MB", "512 KiB") or a count of float32 numbers ("4M parameters")."""
        if isinstance(size, Budget):
            return size
        text = str(size).strip().lower()
        counted = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmb]?)\s*(?:parameters|params)", text)
        sized = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmg]?i?b?)", text)
        bytes_ = math.nan
        if counted:
            bytes_ = 4 * float(counted[1]) * _COUNTS[counted[2]]
        elif sized:
            bytes_ = float(sized[1]) * _UNITS.get(sized[2], math.nan)
        if not 1 <= bytes_ < math.inf:  # float takes hundreds of digits for infinity
            raise UserError(f"The budget {size!r} is not a size: write 1.5MB, 512KiB, or 4M parameters, say.")
        return cls(int(bytes_), counted is not None)

    def part(self, fraction: float) -> Budget:
        return Budget(int(self.bytes * fraction), self.floats_only)

    def largest(self, highest: int, bytes_of: Callable[[int], int]) -> int:
        """The largest size from 1 to ``highest`` whose bytes are within the budget, by halving; 0 where none is."""
        low, high = 0, highest
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if bytes_of(middle) <= self.bytes else (low, middle - 1)
        return low

    def __str__(self) -> str:
        if self.floats_only:
            return f"{self.bytes / 4e6:.3g} M parameters ({readable_bytes(self.bytes)} in float32)"
        return readable_bytes(self.bytes)


def readable_bytes(count: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} bytes"
