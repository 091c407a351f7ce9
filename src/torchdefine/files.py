"""Files that are written whole or not at all and read with a sentence, not a traceback; where cached ones lie."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import Any, BinaryIO

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from torchdefine import plain
from torchdefine.errors import MachineError, UserError

Progress = Callable[[int, int], None]
"""Called with (done, total) now and then during long work, and at its end with (total, total)."""


class Meter:
    """Adds up what is done of long work and tells the caller's progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def advance(self, amount: int) -> None:
        self._done = min(self._done + amount, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        self.advance(self._total - self._done)


NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""System errors that mean a badly chosen path."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""System errors that mean a full disk."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""System errors that mean a process may have no more open files or memory."""

UNFINISHED, LOCK = ".unfinished", ".in-use"
"""Endings of the hidden names beside a file or folder that is being written."""


def cache_folder(cache: str | Path | None = None) -> Path:
    """The folder for what can be made again: ``cache``, $TORCHDEFINE_CACHE, or torchdefine in the user's caches."""
    of_user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    chosen = cache or os.environ.get("TORCHDEFINE_CACHE") or of_user / "torchdefine"
    return from_home(chosen)


@contextmanager
def locked(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Keep other processes from ``path``: wait for one that has it, or refuse with a sentence.

    The lock ends with its process, however that ends; its file, beside ``path``, goes with the lock.
    """
    check_path(path)
    file = path.with_name(f".{path.name}{LOCK}")
    lock = FileLock(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=refusal is None)
    except Timeout:
        raise UserError(refusal or "") from None
    except OSError as error:
        raise write_failure(path, error) from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes it itself
            file.unlink()
        lock.release()


@contextmanager
def _taking_the_place_of(path: Path) -> Iterator[Path]:
    """Where to write what then becomes ``path``; processes that write the same path take turns.

    It is the only entry of a folder, because packages that write one file may put others beside it. What a killed
    process left there is removed first.
    """
    room = path.with_name(f".{path.name}{UNFINISHED}")
    try:
        with locked(path):
            try:
                shutil.rmtree(room, ignore_errors=True)
                room.mkdir()
                yield room / "whole"
                if path.is_dir():
                    path.rmdir()
                os.replace(room / "whole", path)
            finally:
                shutil.rmtree(room, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise write_failure(path, error) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file to that then replaces ``path``, whole, if the block ends without an error."""
    check_path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder or a device, not a file to be written: choose another name.")
    with _taking_the_place_of(path) as temporary:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing bytes; it appears, whole, only if the block ends without an error."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        yield file


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into; it appears as ``path``, whole, only if the block ends without an error."""
    check_new_folder(path)
    with _taking_the_place_of(Path(path)) as temporary:
        temporary.mkdir()
        yield temporary


def make_weights_readable_as(other: Path) -> None:
    """Let those who may read ``other`` read the weights beside it: safetensors writes files for this user only."""
    for path in other.parent.glob("*.safetensors"):
        path.chmod(S_IMODE(other.stat().st_mode))


def is_unfinished(path: Path) -> bool:
    """Whether a killed process left this while it wrote something else; the next write there removes it."""
    return path.name.startswith(".") and path.name.endswith((UNFINISHED, LOCK))


def check_path(path: str | Path) -> Path:
    """The path; one that no system, no text file or not the package safetensors can name is refused."""
    if "\0" in str(path):
        raise UserError(f"The path {path} has a NUL character in it: choose another.")
    if not plain.is_text(str(path)):
        problem = "is not in UTF-8, so it cannot be kept in a file"
        raise UserError(f"The path {str(path)!r} {problem}: rename it, or choose another.")
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # asking whether it is there would raise it
            shown = f"{str(path)[:80]} …" if len(str(path)) > 80 else path
            raise UserError(f"The path {shown} cannot be used ({error.strerror}): choose another.") from None
    return Path(path)


def from_home(path: str | Path) -> Path:
    """A checked path, with the user's folder in the place of a ~ at its beginning."""
    try:
        return check_path(path).expanduser()
    except RuntimeError:
        raise UserError(f"The path {path} names the folder of a user who is not known here: choose another.") from None


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to, before the work whose result goes there."""
    existing = next(above for above in path.absolute().parents if above.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = errno.EACCES if existing.is_dir() else errno.ENOTDIR
        raise write_failure(path, OSError(reason, os.strerror(reason)))


def check_new_folder(path: str | Path) -> None:
    """Refuse a path that exists already, or where no folder can be made."""
    path = check_path(path)
    if path.name in ("", "..") or path.is_symlink():
        raise UserError(f"{path} cannot be the name of a new folder: choose another.")
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{path} exists already and is not empty: choose another folder.")
    if os.path.ismount(path):  # the finished folder could not take its place
        raise UserError(f"{path} is where a disk is mounted, so no folder can take its place: choose one within it.")
    check_writable(path)


def write_failure(path: Path, error: OSError | SafetensorError) -> UserError | MachineError:
    """The sentence for a write to ``path`` that failed: the user's fault where it is not allowed there."""
    if any(os.strerror(number) in str(error) for number in _FULL):  # safetensors has the system's sentence in its own
        way_out = "free some space and start again; a training run can be resumed"
        return MachineError(f"The disk is full, so {path} could not be written: {way_out}.")
    cached = cache_folder().absolute() in path.absolute().parents
    way_out = "let TORCHDEFINE_CACHE name" if cached else "choose"
    reason = getattr(error, "strerror", None) or error
    sentence = f"{path} could not be written ({reason}): {way_out} a folder that can be written to."
    return UserError(sentence) if getattr(error, "errno", None) in NOT_ALLOWED else MachineError(sentence)


def open_failure(path: Path, error: Exception, way_out: str, kind: str = "file") -> UserError | MachineError:
    """The sentence for a file that could not be opened: the machine's fault where it is short of something."""
    what, reason = f"The {kind} {path} cannot be opened", getattr(error, "strerror", None) or error
    if any(os.strerror(number) in str(error) for number in _SHORT):  # safetensors has the system's sentence in its own
        return MachineError(f"{what} ({reason}): raise the limits of the process (`ulimit -a`).")
    return UserError(f"{what} ({reason}): {way_out}.")


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Numbers that are not finite become null, since JSON cannot express them."""
    write_text(path, json.dumps(finite_only(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def seal_of(value: Any) -> str:
    """The hash of plain values: equal for equal ones, whatever file they went through."""
    plainly = json.loads(json.dumps(finite_only(value)))
    return hashlib.sha256(json.dumps(plainly, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """JSON that only this package writes, with the hash of all the rest of it."""
    rest = {name: item for name, item in value.items() if name != "seal"}
    write_json(path, {**rest, "seal": seal_of(rest)})


def read_sealed(path: Path, way_out: str) -> dict[str, Any]:
    """What ``write_sealed`` wrote; a file that was changed since is refused with a way out."""
    value = read_json(path)
    if value.pop("seal", None) != seal_of(value):
        raise UserError(f"{path} is damaged, or was changed after it was written: {way_out}.")
    return value


def finite_only(value: Any) -> Any:
    """The same with None in place of every number that is not finite, for JSON that every tool reads."""
    if isinstance(value, Mapping):
        return {name: finite_only(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_only(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_is_file(path: Path, kind: str = "file") -> None:
    """Refuse what is not there, and what would never end to be read: a folder, a pipe, a device."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(f"The {kind} {path} does not exist: check its name.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"The {kind} {path} cannot be read ({error}).") from None
    if not S_ISREG(status.st_mode):
        raise UserError(f"{path} is a folder, a pipe or a device, but a {kind} is needed here.")


def read_text(path: Path, kind: str = "file", most: int = 64 << 20) -> str:
    """All of a small file; ``kind`` is what it is called where it cannot be read."""
    check_is_file(path, kind)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise UserError(f"The {kind} {path} is larger than {most >> 20} MiB: it is not what it should be.")
            return file.read().decode()
    except OSError as error:
        raise open_failure(path, error, "check its permissions", kind) from None
    except UnicodeDecodeError as error:
        raise UserError(f"The {kind} {path} cannot be read ({error}).") from None


def read_json(path: Path) -> dict[str, Any]:
    value = plain.read_json(read_text(path), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no settings: a JSON object was expected.")
    return value
