"""A text as token ids in one file, read by memory mapping.

The format, version 1, all numbers little-endian:

    bytes 0–7     the magic bytes ``TDTOKENS``
    bytes 8–11    the format version, uint32
    bytes 12–15   the length of the header that follows, uint32
    the header    a JSON object in UTF-8, padded with spaces so that the data begins at a multiple of 64 bytes
    the data      the ids, uint16 where the vocabulary has at most 65,536 tokens and uint32 otherwise

The fields of the header are those of ``TokenHeader``.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchdefine.data.text_files import read_text
from torchdefine.data.tokenization import Tokenization
from torchdefine.errors import UserError
from torchdefine.files import atomic_file

MAGIC = b"TDTOKENS"
VERSION = 1
FEWEST_TOKENS = 2
LOSS_THAT_COUNTS = 0.001
"""Share of a text's characters. A model is credited with the bytes of those too that its tokenizer drops or changes."""

_PREFIX = struct.Struct("<8sII")
_DATA_OFFSET = 1024  # in files we write; room for any header, which is filled in after the data
_ALIGNMENT = 64
_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_READ_AT_ONCE = 16 << 20  # tokens


@dataclass(frozen=True)
class TokenHeader:
    """What is known of a token file without reading its data."""

    dtype: str
    tokens: int
    lines: int
    bytes: int
    """The text's size in UTF-8, newlines included, for bits per byte."""
    unknown: int
    """How many of the tokens are ``<unk>``."""
    vocabulary_sha256: str
    text_sha256: str
    """Of the unpacked bytes of all the text's files, in order."""
    tokens_sha256: str
    """Of the data as it stands in the file."""
    lost_share: float | None = None
    """How many of the text's characters the tokens do not tell, by a sample; None where nobody looked."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file: ``tokens`` is mapped from the disk, not read."""

    path: Path
    header: TokenHeader
    tokens: np.memmap

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Map a token file after checking its kind, version and size."""
        path = Path(path)
        header, offset = _read_header(path)
        dtype = _DTYPES[header.dtype]
        expected, size = offset + header.tokens * dtype.itemsize, path.stat().st_size
        if size != expected:
            raise _damaged(path, f"it has {size:,} bytes where its header says {expected:,}")
        return cls(path, header, np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(header.tokens,)))

    def __len__(self) -> int:
        return self.header.tokens

    @property
    def tokens_sha256(self) -> str:
        """Equal for equal ids in the same order."""
        return self.header.tokens_sha256

    def verify(self) -> None:
        """Read all the data and compare its hash to the header's."""
        digest = hashlib.sha256()
        for start in range(0, len(self), _READ_AT_ONCE):
            digest.update(self.tokens[start : start + _READ_AT_ONCE].data)
        if digest.hexdigest() != self.header.tokens_sha256:
            raise _damaged(self.path, "its tokens are not those that were written")

    def counts(self, vocabulary_size: int) -> np.ndarray:
        """How often each id occurs, (V,); the file is read a part at a time."""
        counts = np.zeros(vocabulary_size, np.int64)
        for start in range(0, len(self), _READ_AT_ONCE):
            counts += np.bincount(self.tokens[start : start + _READ_AT_ONCE], minlength=vocabulary_size)
        return counts


def write_token_file(
    path: Path, texts: Sequence[Path], tokenization: Tokenization, advance: Callable[[int], None]
) -> None:
    """Encode text files, in order, into one token file; ``advance`` is told how many bytes have been read."""
    with token_file_writer(path, tokenization, _names(texts)) as writer:
        for text in texts:
            for block in read_text(text):
                writer.add(tokenization.encode_lines(block.lines), block.raw, len(block.lines))
                writer.note_lost(*tokenization.lost_characters(block.lines))
                advance(block.disk_bytes)


class TokenFileWriter:
    """Takes a text's ids block by block; nothing but the current block is held in memory."""

    def __init__(self, file: BinaryIO, tokenization: Tokenization) -> None:
        self._file, self._tokenization = file, tokenization
        self.dtype = "uint16" if len(tokenization) <= 1 << 16 else "uint32"
        self._text_hash, self._tokens_hash = hashlib.sha256(), hashlib.sha256()
        self._lines = self._bytes = self._unknown = 0
        self._lost = self._looked_at = 0
        self.tokens = 0

    def add(self, ids: np.ndarray, raw: bytes, lines: int) -> None:
        """The ids of some more lines, each line ended by ``<eos>``, and the bytes that they were made of."""
        ids = ids.astype(_DTYPES[self.dtype])
        self._file.write(ids.data)
        self._text_hash.update(raw)
        self._tokens_hash.update(ids.data)
        self.tokens += len(ids)
        self._lines += lines
        self._bytes += len(raw)
        if self._tokenization.unk_id is not None:
            self._unknown += int(np.count_nonzero(ids == self._tokenization.unk_id))

    def note_lost(self, characters: int, looked_at: int) -> None:
        """Count characters of a sample that cannot be told from the ids, and the sample's."""
        self._lost += characters
        self._looked_at += looked_at

    def header(self) -> TokenHeader:
        return TokenHeader(
            dtype=self.dtype,
            tokens=self.tokens,
            lines=self._lines,
            bytes=self._bytes,
            unknown=self._unknown,
            vocabulary_sha256=self._tokenization.sha256,
            text_sha256=self._text_hash.hexdigest(),
            tokens_sha256=self._tokens_hash.hexdigest(),
            lost_share=self._lost / self._looked_at if self._looked_at else None,
        )


@contextmanager
def token_file_writer(path: Path, tokenization: Tokenization, text_name: str) -> Iterator[TokenFileWriter]:
    """Write a token file; it appears, whole, only if the block ends without an error."""
    with atomic_file(path) as file:
        file.write(bytes(_DATA_OFFSET))
        writer = TokenFileWriter(file, tokenization)
        yield writer
        if writer.tokens < FEWEST_TOKENS:
            raise UserError(
                f"{text_name} has {writer.tokens} token, but at least {FEWEST_TOKENS} are needed: add text."
            )
        file.seek(0, os.SEEK_SET)
        file.write(_pack(writer.header()))


def _pack(header: TokenHeader) -> bytes:
    length = _DATA_OFFSET - _PREFIX.size
    return _PREFIX.pack(MAGIC, VERSION, length) + json.dumps(asdict(header)).encode().ljust(length)


def _read_header(path: Path) -> tuple[TokenHeader, int]:
    """The header and where the data begins."""
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size)
            if not prefix.startswith(MAGIC):
                raise UserError(f"{path} is not a token file of torchdefine: it does not begin with {MAGIC.decode()}.")
            if len(prefix) < _PREFIX.size:
                raise _damaged(path, "it ends within its header")
            _, version, length = _PREFIX.unpack(prefix)
            if version != VERSION:
                raise UserError(
                    f"{path} has format version {version}, but this torchdefine reads version {VERSION}: "
                    "update torchdefine, or delete the file so that the text is encoded again."
                )
            packed = file.read(length)
    except OSError as error:
        raise UserError(f"The token file {path} cannot be opened ({error.strerror}): check its name.") from error
    if len(packed) < length or (_PREFIX.size + length) % _ALIGNMENT:
        raise _damaged(path, "it ends within its header")
    try:
        values = json.loads(packed)
        known = {field.name for field in fields(TokenHeader)} & values.keys()
        header = TokenHeader(**{name: values[name] for name in known})
    except (ValueError, AttributeError, TypeError) as error:
        raise _damaged(path, "its header cannot be read") from error
    if header.dtype not in _DTYPES or not isinstance(header.tokens, int) or header.tokens < FEWEST_TOKENS:
        raise _damaged(path, "its header is not one that torchdefine writes")
    return header, _PREFIX.size + length


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"The token file {path} is damaged ({reason}): delete it so that the text is encoded again, or copy it again."
    )


def _names(texts: Sequence[Path]) -> str:
    return " with ".join(str(text) for text in texts)
