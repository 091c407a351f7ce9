"""Text files, plain or packed (.gz, .xz, .zst), and parallel ones, as blocks of lines in bounded memory.

Lines end at ``\\n`` only. A file that is not readable text is refused in one sentence that says where the problem is.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from torchdefine.data.sources import PairedFiles
from torchdefine.errors import MachineError, UserError
from torchdefine.files import check_is_file, open_failure

BLOCK_BYTES = 4 << 20
LONGEST_LINE_BYTES = 128 << 20
"""A line is held in memory as a whole; this bounds it, and still admits corpora of one long line (text8)."""

_PAIRS_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class TextBlock:
    """Some whole lines of a text file."""

    lines: list[str]
    raw: bytes
    """The unpacked bytes that the lines were read from, newlines included."""
    disk_bytes: int
    """How many bytes of the file, as it lies on disk, were read for this block: the measure of progress."""


def read_text(path: Path, *, may_be_empty: bool = False) -> Iterator[TextBlock]:
    """Stream the lines of a UTF-8 file; a binary, damaged, cut-off or, by default, empty one is a UserError."""
    position = lines_before = bytes_before = 0
    with _open(path) as file:
        for raw in _whole_lines(_unpack(path, file), path):
            lines = _decode(raw, path, lines_before, bytes_before).split("\n")
            if raw.endswith(b"\n"):
                lines.pop()
            reached = file.tell()
            yield TextBlock(lines, raw, reached - position)
            position = reached
            lines_before += len(lines)
            bytes_before += len(raw)
    if not bytes_before and not may_be_empty:
        raise UserError(f"{path} is empty: give a file with text in it.")


def read_texts(paths: Iterable[Path], advance: Callable[[int], None] = lambda _: None) -> Iterator[TextBlock]:
    """The same for files that follow each other; ``advance`` is told how many bytes of them are done with."""
    for path in paths:
        for block in read_text(path):
            yield block
            advance(block.disk_bytes)


def bytes_of(paths: Iterable[Path]) -> int:
    """The size of files that are there, for a progress bar."""
    return sum(path.stat().st_size for path in paths if path.is_file())


def decode_text(raw: bytes, name: str) -> list[str]:
    """The lines of a UTF-8 text that is in memory already, none for an empty one; ``name`` is for messages."""
    return _decode(raw, name).removesuffix("\n").split("\n") if raw else []


PairBlock = tuple[list[str], list[str]]
"""Lines of the source and of the target, as they stand in the files."""


def read_pairs(files: PairedFiles, advance: Callable[[int], None] = lambda _: None) -> Iterator[PairBlock]:
    """Stream the pairs of a split; sides of unequal length and rows without two columns are a UserError."""
    if files.target is None:
        for table in files.source:
            yield from _read_table(table, advance)
        return
    sides = (files.source, files.target)
    pairs = zip_longest(*(chain.from_iterable(block.lines for block in read_texts(side, advance)) for side in sides))
    while chunk := list(islice(pairs, _PAIRS_AT_ONCE)):
        if None in chunk[-1]:
            source, target = (sum(len(block.lines) for block in read_texts(side)) for side in sides)
            sizes = f"{files.source[0]} has {source:,} lines and {files.target[0]} has {target:,}"
            raise UserError(f"{sizes}, but line must stand for line: align them again.")
        yield [pair[0] for pair in chunk], [pair[1] for pair in chunk]


def _read_table(table: Path, advance: Callable[[int], None]) -> Iterator[PairBlock]:
    lines_before = 0
    for block in read_texts([table], advance):
        rows = [line.split("\t") for line in block.lines]
        for number, row in enumerate(rows, start=lines_before + 1):
            if len(row) < 2:
                raise UserError(f"Line {number:,} of {table} has no second column: put a tab before the target.")
        yield [row[0] for row in rows], [row[1] for row in rows]
        lines_before += len(rows)


def _open(path: Path) -> BinaryIO:
    check_is_file(path, "text file")
    try:
        return path.open("rb")
    except OSError as error:
        raise open_failure(path, error, "check its permissions", "text file") from error


def _unpack(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        if path.suffix.lower() == ".zst":
            yield from _unpack_zst(path, file)
            return
        unpackers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
        unpacked = unpackers.get(path.suffix.lower(), lambda packed: packed)(file)
        while chunk := unpacked.read(BLOCK_BYTES):
            yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        reason = str(error).rstrip(".")
        raise UserError(f"{path} is damaged or was cut short ({reason}): copy or download it again.") from error
    except OSError as error:
        raise MachineError(f"{path} could not be read ({error.strerror or error}): check the disk.") from error


def _unpack_zst(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"Reading {path} needs the package zstandard: pip install 'torchdefine[zst]'.") from error
    # The package's stream reader takes a cut-off file for a finished one; only this object can tell them apart.
    decompressor, frame = zstandard.ZstdDecompressor(max_window_size=1 << 31), None
    try:
        while packed := file.read(64 << 10):
            while packed:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(packed)
                packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    if frame is not None:
        raise EOFError("the last frame is not finished")


def _whole_lines(chunks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Regroup chunks so that each ends with a line; the very last line may lack its newline."""
    pending: list[bytes] = []
    for chunk in chunks:
        if end := chunk.rfind(b"\n") + 1:
            yield b"".join([*pending, chunk[:end]])
            pending = []
        pending.append(chunk[end:])
        if sum(map(len, pending)) > LONGEST_LINE_BYTES:
            longest = LONGEST_LINE_BYTES >> 20
            raise UserError(f"{path} has a line of more than {longest} MiB: put one sentence or paragraph on a line.")
    if any(pending):
        yield b"".join(pending)


def _decode(raw: bytes, path: Path | str, lines_before: int = 0, bytes_before: int = 0) -> str:
    try:
        text = raw.decode("utf-8")
        if "\0" not in text:
            return text if bytes_before else text.removeprefix("\ufeff")  # the mark some editors put first is not text
        at, kind = raw.index(b"\0"), "is a binary file, not text"
    except UnicodeDecodeError as error:
        at, kind = error.start, "is not UTF-8 text"
    line = lines_before + raw.count(b"\n", 0, at) + 1
    where = f"line {line:,} has the byte 0x{raw[at]:02x} at position {bytes_before + at:,}"
    raise UserError(f"{path} {kind}: {where}; save it as plain text in UTF-8.")
