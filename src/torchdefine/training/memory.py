"""What happens to memory on the host between one step and the next."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's constants
KEPT_FREE = 512 << 20
LARGEST_KEPT = (256 << 20, 32 << 20)
"""Larger pieces go back to the system when they are freed. Older versions of glibc allow no more than the second."""


def keep_freed_memory() -> None:
    """Let the C library keep memory that a step frees for the next one, up to half a gigabyte.

    By default it returns large pieces to the system, which fills new ones with zeros, page by page. This takes a good
    part of a small model's step on a CPU. Where the library is not glibc, nothing changes.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    if any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_KEPT):
        mallopt(TRIM_THRESHOLD, KEPT_FREE)
