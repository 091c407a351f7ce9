"""Files from the network: resumed where a transfer broke off, checked by hash, unpacked member by member."""

from __future__ import annotations

import gzip
import http.client
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, cast

from torchdefine.errors import MachineError
from torchdefine.files import Progress, atomic_file, sha256_of, write_failure, write_text
from torchdefine.spelling import option

ATTEMPTS = 4
FIRST_WAIT_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0

_CHUNK_BYTES = 256 << 10
_BY_HAND = f"try again later, or fetch it by hand, put its text files into a folder and pass that as {option('data')}"


def download(url: str, target: Path, sha256: str | None = None, progress: Progress | None = None) -> str:
    """Fetch ``url`` into the file ``target``, continuing what an earlier attempt left in ``target``.part; its hash.

    Without a known ``sha256`` the hash of the first download is kept in ``target``.sha256, and later downloads
    must have the same. A wrong hash and a network that cannot be reached are MachineErrors.
    """
    part, wait = target.with_name(f"{target.name}.part"), FIRST_WAIT_SECONDS
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _fetch(url, part, progress)
            break
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
    found, record = sha256_of(part), hash_record(target)
    if sha256 is None and not record.is_file():
        write_text(record, f"{found}\n")
    if found != (expected := sha256 or record.read_text().strip()):
        part.unlink()
        origin = "the published one" if sha256 else f"that of the first download, kept in {record}"
        raise MachineError(
            f"The file from {url} has the SHA-256 {found} where {expected} was expected ({origin}): {_BY_HAND}."
        )
    part.replace(target)
    return found


def hash_record(target: Path) -> Path:
    """The file that keeps the hash of the first download of ``target``; remove it to accept another file."""
    return target.with_name(f"{target.name}.sha256")


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    """One attempt: continue ``part`` where the server can, and start it afresh where it cannot."""
    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "torchdefine"} | ({"Range": f"bytes={have}-"} if have else {})
    request = urllib.request.Request(url, headers=headers)
    with closing(urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0
        announced = response.headers.get("Content-Length")
        total = have + int(announced) if announced else None
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            file = part.open("ab" if have else "wb")
        except OSError as error:
            raise write_failure(part, error) from error
        with file:
            while chunk := response.read(_CHUNK_BYTES):
                try:
                    file.write(chunk)
                    file.flush()
                except OSError as error:
                    raise write_failure(part, error) from error
                have += len(chunk)
                if progress is not None and total is not None:
                    progress(min(have, total), total)
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke off after {have:,} of {total:,} bytes")


def extract(archive: Path, members: Mapping[str, Path]) -> None:
    """Take the named members of a .zip or .tgz file, and nothing else, each to the file it is mapped to."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                for name, target in members.items():
                    _write_member(packed.open(name), target)
            return
        with gzip.open(archive) as unpacked:
            while unpacked.read(_CHUNK_BYTES):
                pass  # tarfile stops before gzip's checksum, which stands at the end
        with tarfile.open(archive, "r:gz") as tar:
            files = {info.name.removeprefix("./"): info for info in tar if info.isfile()}
            for name, target in members.items():
                _write_member(cast(IO[bytes], tar.extractfile(files[name])), target)
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise MachineError(f"The archive {archive} is damaged ({error}): fetch it again.") from error
    except KeyError as error:
        raise MachineError(f"The archive {archive} lacks a file that it should have: {error.args[0]}.") from error


def _write_member(source: IO[bytes], target: Path) -> None:
    with source, atomic_file(target) as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)
