"""Where files are kept and how they get there whole: the cache folder, and writes that happen fully or not."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torchdefine.errors import MachineError

Progress = Callable[[int, int], None]
"""Called with (done, total) now and then during long work, and at its end with (total, total)."""


def cache_folder(cache: str | Path | None = None) -> Path:
    """The folder for what can be made again: ``cache``, $TORCHDEFINE_CACHE or ~/.cache/torchdefine."""
    chosen = cache or os.environ.get("TORCHDEFINE_CACHE") or Path("~/.cache/torchdefine")
    return Path(chosen).expanduser()


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing bytes; it appears, whole, only if the block ends without an error.

    Until then the bytes go to a file of another name in the same folder, so an existing file is never harmed
    and two processes that write the same path do not meet. A write that fails is a MachineError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise write_failure(path, error) from error
    finally:
        with suppress(OSError):  # after a success there is nothing left to remove
            temporary.unlink()


def write_failure(path: Path, error: OSError) -> MachineError:
    """The sentence for a write to ``path`` that the machine refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(f"The disk is full, so {path} could not be written: free some space and start again.")
    return MachineError(
        f"{path} could not be written ({error.strerror or error}): choose a folder that can be written to; "
        "TORCHDEFINE_CACHE names the one for cached files."
    )
