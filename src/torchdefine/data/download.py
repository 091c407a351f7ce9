"""Files from the network: bounded in size, time and slowness, checked by hash, unpacked member by member."""

from __future__ import annotations

import gzip
import http.client
import lzma
import re
import struct
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, cast

from torchdefine.errors import MachineError, UserError
from torchdefine.files import Progress, atomic_file, sha256_of, write_failure, write_text
from torchdefine.spelling import option

ATTEMPTS = 4
FIRST_WAIT_SECONDS = 1.0
TIMEOUT_SECONDS = 15.0
"""For an answer, for each piece of it, and between two looks at its speed."""
TOTAL_SECONDS = 3600.0
LEAST_BYTES_A_SECOND = 1 << 10
MOST_BYTES = 1 << 30
MOST_UNPACKED_BYTES = 4 << 30
MOST_TIMES_LARGER = 100
"""An archive's texts than the archive itself; texts are packed to a third or a tenth."""

_CHUNK_BYTES = 256 << 10
_ALWAYS_UNPACKED = 16 << 20
_BY_HAND = f"try again later, or fetch it by hand, put its text files into a folder and pass that as {option('data')}"


def download(url: str, target: Path, sha256: str | None = None, progress: Progress | None = None) -> str:
    """Fetch ``url`` into the file ``target``; its hash.

    The hash must be ``sha256``, or the one that ``keep_hash`` kept. Only where one is known is it safe to go on with
    what a killed download left in ``target``.part; a download that fails leaves nothing behind. A wrong hash and a
    network that cannot be reached are MachineErrors.
    """
    part, record = target.with_name(f"{target.name}.part"), hash_record(target)
    expected = sha256 or (record.read_text().strip() if record.is_file() else None)
    if (stale := part.is_file()) and expected is None:
        part.unlink()
    try:
        _fetch(url, part, progress)
        found = sha256_of(part)
        if expected is not None and found != expected:
            part.unlink()
            if stale:
                return download(url, target, sha256, progress)
            origin = "the published one" if sha256 else f"that of the first download, kept in {record}"
            raise MachineError(
                f"The file from {url} has the SHA-256 {found} where {expected} was expected ({origin}): {_BY_HAND}."
            )
        part.replace(target)
    except (MachineError, UserError):
        with suppress(OSError):
            part.unlink()
        raise
    return found


def hash_record(target: Path) -> Path:
    """The file that keeps the hash of the first good download of ``target``; remove it to accept another file."""
    return target.with_name(f"{target.name}.sha256")


def keep_hash(target: Path, sha256: str) -> None:
    """Let later downloads of ``target`` have the hash of this one, which has proved good."""
    write_text(hash_record(target), f"{sha256}\n")


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    """Fill ``part``, in several attempts, each going on where the one before broke off."""
    deadline, wait, version = time.monotonic() + TOTAL_SECONDS, FIRST_WAIT_SECONDS, ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with closing(_answer(url, part, version)) as response:
                version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
                _receive(response, part, deadline, progress)
            return
        except (OSError, http.client.HTTPException) as error:
            status, reason = None, getattr(error, "reason", None) or error or type(error).__name__
            if isinstance(error, urllib.error.HTTPError):
                status, reason = error.code, f"the server answered {error.code} {error.reason}"
                error.close()
            if status == 416:  # the part left from before is not a beginning of this file
                part.unlink(missing_ok=True)
            if attempt == ATTEMPTS or not (status is None or status >= 500 or status in (408, 416, 429)):
                raise MachineError(f"{url} could not be downloaded ({reason}): {_BY_HAND}.") from error
        time.sleep(wait)
        wait *= 2


def _answer(url: str, part: Path, version: str) -> Any:
    """The server's answer to a request for what ``part`` lacks, or for all where its ``version`` is another now."""
    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "torchdefine"} | ({"Range": f"bytes={have}-"} if have else {})
    headers |= {"If-Range": version} if have and version and not version.startswith("W/") else {}
    request, answers = urllib.request.Request(url, headers=headers), SimpleQueue[Any]()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS))
        except Exception as error:
            answers.put(error)

    # In a thread, since names, redirections and slow headers have no time-out of their own together.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=2 * TIMEOUT_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer in {2 * TIMEOUT_SECONDS:.0f} seconds") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _receive(response: Any, part: Path, deadline: float, progress: Progress | None) -> None:
    """Write an answer behind what ``part`` has, or in its place where the server sends everything."""
    have = part.stat().st_size if part.is_file() and response.status == http.HTTPStatus.PARTIAL_CONTENT else 0
    announced = response.headers.get("Content-Length", "")
    total = have + int(announced) if re.fullmatch(r"\d{1,18}", announced) else None
    looked, then = time.monotonic(), have
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("ab" if have else "wb")
    except OSError as error:
        raise write_failure(part, error) from error
    with file:
        while (total is None or total <= MOST_BYTES) and (chunk := response.read1(_CHUNK_BYTES)):
            try:
                file.write(chunk)
                file.flush()
            except OSError as error:
                raise write_failure(part, error) from error
            have += len(chunk)
            if progress is not None and total is not None:
                progress(min(have, total), total)
            now = time.monotonic()
            if now > deadline:
                raise MachineError(f"{part.name} took more than {TOTAL_SECONDS / 60:.0f} minutes: {_BY_HAND}.")
            if now > looked + TIMEOUT_SECONDS:
                if have - then < LEAST_BYTES_A_SECOND * (now - looked):
                    slow = f"fewer than {LEAST_BYTES_A_SECOND:,} bytes came in a second"
                    raise MachineError(f"The network is too slow for {part.name} ({slow}): {_BY_HAND}.")
                looked, then = now, have
            if have > MOST_BYTES:
                break
    if max(have, total or 0) > MOST_BYTES:
        raise MachineError(f"The answer has more than {MOST_BYTES:,} bytes, so it is not {part.stem}: {_BY_HAND}.")
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke off after {have:,} of {total:,} bytes")


def extract(archive: Path, members: Mapping[str, Path]) -> None:
    """Take the named members of a .zip or .tgz file, and nothing else, each to the file it is mapped to."""
    most = min(MOST_UNPACKED_BYTES, _ALWAYS_UNPACKED + MOST_TIMES_LARGER * archive.stat().st_size)
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                for name, target in members.items():
                    most -= _write_member(packed.open(name), target, most)
            return
        with gzip.open(archive) as unpacked:
            while chunk := unpacked.read(_CHUNK_BYTES):  # tarfile stops before gzip's checksum, which stands at the end
                most -= len(chunk)
                if most < 0:
                    raise tarfile.TarError("it unpacks to far more than texts do")
        with _InPieces(archive) as pieces, tarfile.open(fileobj=pieces, mode="r:") as tar:
            files = {info.name.removeprefix("./"): info for info in tar if info.isfile()}
            for name, target in members.items():
                _write_member(cast(IO[bytes], tar.extractfile(files[name])), target, MOST_UNPACKED_BYTES)
    except (MachineError, UserError):
        raise
    except KeyError as error:
        raise MachineError(f"The archive {archive} lacks a file that it should have: {error.args[0]}.") from error
    except (*_DAMAGE, RuntimeError, NotImplementedError, ValueError, OverflowError) as error:
        raise MachineError(f"The archive {archive} is damaged ({error}): fetch it again.") from error


_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
)


class _InPieces(gzip.GzipFile):
    """Its tar headers cannot make the reader take much memory."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _ALWAYS_UNPACKED:
            raise tarfile.TarError("it has a header of many megabytes")
        return super().read(size)


def _write_member(source: IO[bytes], target: Path, most: int) -> int:
    """How many bytes were written, at most so many."""
    written = 0
    with source, atomic_file(target) as file:
        while chunk := source.read(_CHUNK_BYTES):
            written += len(chunk)
            if written > most:
                raise zipfile.BadZipFile("it unpacks to far more than texts do")
            file.write(chunk)
    return written
