"""Text files, plain or packed (.gz, .xz, .zst), as blocks of lines in bounded memory; which file is which split.

Lines end at ``\\n`` only. A file that is not readable text is refused in one sentence that says where the problem is.
"""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchdefine.errors import MachineError, UserError

BLOCK_BYTES = 4 << 20
LONGEST_LINE_BYTES = 128 << 20
"""A line is held in memory as a whole; this bounds it, and still admits corpora of one long line (text8)."""

SPLITS = ("train", "valid", "test")
"""The parts of a corpus; it need not have all of them."""

FOLDER_LAYOUT = (
    "a corpus is a folder with a training file such as train.txt and, if there are any, valid.txt and "
    "test.txt, each plain or packed as .gz, .xz or .zst"
)

_SPLIT_OF_PART = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}


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
    if may_be_empty and path.is_file() and not path.stat().st_size:
        return
    position = lines_before = bytes_before = 0
    with _open(path) as file:
        for raw in _whole_lines(_unpack(path, file), path):
            text = _decode(raw, path, lines_before, bytes_before)
            if not bytes_before:
                text = text.removeprefix("\ufeff")  # the mark some editors put before UTF-8 is not text
            lines = text.split("\n")
            if raw.endswith(b"\n"):
                lines.pop()
            reached = file.tell()
            yield TextBlock(lines, raw, reached - position)
            position = reached
            lines_before += len(lines)
            bytes_before += len(raw)
    if not bytes_before and not may_be_empty:
        raise UserError(f"{path} is empty: give a file with text in it.")


def decode_text(raw: bytes, name: str) -> list[str]:
    """The lines of a UTF-8 text that is in memory already, none for an empty one; ``name`` is for messages."""
    if not raw:
        return []
    text = _decode(raw, name, 0, 0).removeprefix("\ufeff")
    return text.removesuffix("\n").split("\n")


def find_splits(folder: str | Path, *, require_train: bool = True) -> dict[str, list[Path]]:
    """The files of each split ("train", "valid", "test") of a corpus folder, numbered parts in their order.

    A file belongs to a split if a part of its name says so: train.txt, train-1.txt.xz, wiki.valid.tokens.
    """
    folder = Path(folder)
    if folder.is_file():
        raise UserError(f"{folder} is a single file, but {FOLDER_LAYOUT}: put it into a folder of its own.")
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: {FOLDER_LAYOUT}.")
    splits: dict[str, list[Path]] = {}
    files = sorted((path for path in folder.iterdir() if is_candidate(path)), key=natural_order)
    for path in files:
        if split := split_named_by(path):
            splits.setdefault(split, []).append(path)
    for split, parts in splits.items():
        _check_parts_belong_together(folder, split, parts)
    if not splits or (require_train and "train" not in splits):
        wanted = "training" if require_train else "train, valid or test"
        found = ", ".join(path.name for path in files) or "no files"
        raise UserError(f"{folder} has no {wanted} file (found: {found}): {FOLDER_LAYOUT}.")
    return {split: splits[split] for split in SPLITS if split in splits}


def is_candidate(path: Path) -> bool:
    """Whether a file of a folder may be a text; a broken link may be meant as one."""
    return (path.is_file() or _is_broken_link(path)) and not path.name.startswith(".")


def _is_broken_link(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def split_named_by(path: Path) -> str | None:
    """The split that a part of a file's name says; a file that names several, or a link to nothing, is refused."""
    parts = (part.rstrip("0123456789") for part in re.split(r"[._-]+", path.name.lower()))
    named = sorted({_SPLIT_OF_PART[part] for part in parts if part in _SPLIT_OF_PART})
    if len(named) > 1:
        raise UserError(f"{path} names several splits ({', '.join(named)}): rename it to one of them.")
    if named and _is_broken_link(path):
        raise UserError(f"{path} is a link to {path.readlink()}, which is not there: mend the link or remove it.")
    return named[0] if named else None


def natural_order(path: Path) -> list[tuple[int, str]]:
    """Digits count as numbers, so that train-2 stands before train-10."""
    pieces = re.findall(r"\d+|\D+", path.name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]


def _check_parts_belong_together(folder: Path, split: str, parts: list[Path]) -> None:
    """Parts of one text differ in a number only, unlike train.en and train.de or train.txt and train.txt.gz."""
    if len({re.sub(r"[._-]?\d+", "#", part.name) for part in parts}) > 1:
        found = ", ".join(part.name for part in parts)
        raise UserError(
            f"{folder} has several {split} files that are not numbered parts of one text ({found}): "
            "keep one of them, or name parts like train-1.txt and train-2.txt."
        )


def _open(path: Path) -> BinaryIO:
    if path.is_dir():
        raise UserError(f"{path} is a folder, but a text file is needed here.")
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UserError(f"There is no file {path}: check its name.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}): check its permissions.") from error
    if not path.stat().st_size:
        file.close()
        raise UserError(f"{path} is empty: give a file with text in it.")
    return file


def _unpack(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        match path.suffix.lower():
            case ".zst":
                yield from _unpack_zst(path, file)
            case ".gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield from _chunks(unpacked)
            case ".xz":
                with lzma.LZMAFile(file) as unpacked:
                    yield from _chunks(unpacked)
            case _:
                yield from _chunks(file)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _damaged_archive(path, error) from error
    except OSError as error:
        raise MachineError(f"{path} could not be read ({error.strerror or error}): check the disk.") from error


def _chunks(stream: BinaryIO | gzip.GzipFile | lzma.LZMAFile) -> Iterator[bytes]:
    while chunk := stream.read(BLOCK_BYTES):
        yield chunk


def _unpack_zst(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"Reading {path} needs the package zstandard: pip install 'torchdefine[zst]'.") from error
    # The package's stream reader takes a cut-off file for a finished one; only this object can tell them apart.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = decompressor.decompressobj()
    frame_begun = False
    try:
        while packed := file.read(64 << 10):
            while packed:
                if text := frame.decompress(packed):
                    yield text
                frame_begun = not frame.eof
                packed = frame.unused_data
                if frame.eof:
                    frame = decompressor.decompressobj()
    except zstandard.ZstdError as error:
        raise _damaged_archive(path, error) from error
    if frame_begun:
        raise EOFError("the last frame is not finished")


def _damaged_archive(path: Path, error: Exception) -> UserError:
    reason = str(error).rstrip(".")
    return UserError(f"{path} is damaged or was cut short ({reason}): copy or download it again.")


def _whole_lines(chunks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Regroup chunks so that each ends with a line; the very last line may lack its newline."""
    pending: list[bytes] = []
    pending_bytes = 0
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*pending, chunk[:end]])
            pending, pending_bytes = [], 0
        pending.append(chunk[end:])
        pending_bytes += len(chunk) - end
        if pending_bytes > LONGEST_LINE_BYTES:
            raise UserError(
                f"{path} has a line of more than {LONGEST_LINE_BYTES >> 20} MiB: "
                "put one sentence or paragraph on a line."
            )
    if pending_bytes:
        yield b"".join(pending)


def _decode(raw: bytes, path: Path | str, lines_before: int, bytes_before: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at, kind = error.start, "is not UTF-8 text"
    else:
        if "\0" not in text:
            return text
        at, kind = raw.index(b"\0"), "is a binary file, not text"
    line = lines_before + raw.count(b"\n", 0, at) + 1
    raise UserError(
        f"{path} {kind}: line {line:,} has the byte 0x{raw[at]:02x} at position {bytes_before + at:,}; "
        "save it as plain text in UTF-8."
    )
