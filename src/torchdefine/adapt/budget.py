"""A size that a table may have: bytes, or parameters in float32."""

from __future__ import annotations

import math
import re
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
        counted = re.fullmatch(r"([\d.]+)\s*([kmb]?)\s*(?:parameters|params)", text)
        sized = re.fullmatch(r"([\d.]+)\s*([kmg]?i?b?)", text)
        try:
            if counted:
                return cls._checked(4 * float(counted[1]) * _COUNTS[counted[2]], True)
            if sized:
                return cls._checked(float(sized[1]) * _UNITS[sized[2]], False)
        except (KeyError, ValueError):
            pass
        raise UserError(f"The budget {size!r} is not a size: write 1.5MB, 512KiB, or 4M parameters, say.")

    @classmethod
    def _checked(cls, bytes_: float, floats_only: bool) -> Budget:
        if not 1 <= bytes_ < math.inf:  # float takes hundreds of digits for infinity
            raise ValueError
        return cls(int(bytes_), floats_only)

    def share(self, share: float) -> Budget:
        return Budget(int(self.bytes * share), self.floats_only)

    def __str__(self) -> str:
        if self.floats_only:
            return f"{self.bytes / 4e6:.3g} M parameters ({readable_bytes(self.bytes)} in float32)"
        return readable_bytes(self.bytes)


def readable_bytes(count: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} bytes"
