"""A text as token ids in one file, read by memory mapping.

The format, version 1, all numbers little-endian:

    bytes 0–7     the magic bytes ``TDTOKENS``
    bytes 8–11    the format version, uint32
    bytes 12–15   the length of the header that follows, uint32
    the header    a JSON object in UTF-8, padded with spaces so that the data begins at byte 1024
    the data      the ids, uint16 where the vocabulary has at most 65,536 tokens and uint32 otherwise

The fields of the header are those of ``TokenHeader``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchdefine.data.text_files import read_texts
from torchdefine.data.vocabulary import Tokenization
from torchdefine.errors import UserError
from torchdefine.files import atomic_file

MAGIC = b"TDTOKENS"
VERSION = 1
FEWEST_TOKENS = 2
LOSS_THAT_COUNTS = 0.001
"""Fraction of a text's characters; a model is credited with the bytes of those, too, that its tokenizer drops."""

_PREFIX = struct.Struct("<8sII")
_DATA_OFFSET = 1024  # room for any header, which is filled in after the data
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
    lost_share: float | None
    """How many of the text's characters the tokens do not tell, by a sample; None for a bitext."""


AddLines = Callable[[np.ndarray, bytes, int, tuple[int, int]], None]
"""Takes the ids of some lines, each ended by ``<eos>``, their bytes, their number and ``lost_characters``."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file: ``tokens`` is mapped from the disk, not read."""

    path: Path
    header: TokenHeader
    tokens: np.memmap

    @classmethod
    def open(cls, path: str | Path, tokenization: Tokenization | None = None) -> TokenFile:
        """Map a token file after checking its kind, version and size, and that it was made with a tokenization."""
        path = Path(path)
        header = _read_header(path)
        if tokenization is not None and header.vocabulary_sha256 != tokenization.sha256:
            raise UserError(
                f"{path} was made with another vocabulary than the one beside it: delete the folder {path.parent} so "
                "that the text is encoded again."
            )
        dtype = _DTYPES[header.dtype]
        expected, size = _DATA_OFFSET + header.tokens * dtype.itemsize, path.stat().st_size
        if size != expected:
            raise _damaged(path, f"it has {size:,} bytes where its header says {expected:,}")
        return cls(path, header, np.memmap(path, dtype=dtype, mode="r", offset=_DATA_OFFSET, shape=(header.tokens,)))

    def __len__(self) -> int:
        return self.header.tokens

    @property
    def tokens_sha256(self) -> str:
        """Equal for equal ids in the same order."""
        return self.header.tokens_sha256

    def facts(self) -> dict[str, Any]:
        """What the result of a run says of it."""
        return {name: getattr(self.header, name) for name in ("tokens", "text_sha256", "tokens_sha256", "lost_share")}

    def verify(self) -> None:
        """Read all the data and compare its hash to the header's."""
        digest = hashlib.sha256()
        for _, part in self._parts():
            digest.update(part.data)
        if digest.hexdigest() != self.header.tokens_sha256:
            raise _damaged(self.path, "its tokens are not those that were written")

    def counts(self, vocabulary_size: int) -> np.ndarray:
        """How often each id occurs, (V,)."""
        counts = np.zeros(vocabulary_size, np.int64)
        for _, part in self._parts():
            counts += np.bincount(part, minlength=vocabulary_size)
        return counts

    def ends(self, eos_id: int) -> np.ndarray:
        """Where each line ends, its ``<eos>`` included, (lines,); it begins where the one before ends."""
        return np.concatenate([np.flatnonzero(part == eos_id) + start + 1 for start, part in self._parts()])

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """The tokens as much at a time as memory should hold, and where each part starts."""
        for start in range(0, len(self), _READ_AT_ONCE):
            yield start, self.tokens[start : start + _READ_AT_ONCE]


def _read_header(path: Path) -> TokenHeader:
    try:
        with path.open("rb") as file:
            head = file.read(_DATA_OFFSET)
    except OSError as error:
        raise UserError(f"The token file {path} cannot be opened ({error.strerror}): check its name.") from error
    if not head.startswith(MAGIC):
        raise UserError(f"{path} is not a token file of torchdefine: it does not begin with {MAGIC.decode()}.")
    if len(head) < _DATA_OFFSET:
        raise _damaged(path, "it ends within its header")
    _, version, _ = _PREFIX.unpack_from(head)
    if version != VERSION:
        raise UserError(
            f"{path} has format version {version}, but this torchdefine reads version {VERSION}: "
            "update torchdefine, or delete the file so that the text is encoded again."
        )
    try:
        header = TokenHeader(**json.loads(head[_PREFIX.size :]))
        if header.dtype not in _DTYPES or header.tokens < FEWEST_TOKENS:
            raise ValueError(f"{header.tokens} tokens of {header.dtype}")
    except (ValueError, TypeError) as error:
        raise _damaged(path, "its header cannot be read") from error
    return header


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"The token file {path} is damaged ({reason}): delete it so that the text is encoded again, or copy it again."
    )


def write_token_file(
    path: Path, texts: Sequence[Path], tokenization: Tokenization, advance: Callable[[int], None]
) -> None:
    """Encode text files, in order, into one token file; ``advance`` is told how many bytes have been read."""
    with token_file_writer(path, tokenization, " with ".join(map(str, texts))) as add:
        for block in read_texts(texts, advance):
            ids = tokenization.encode_lines(block.lines)
            add(ids, block.raw, len(block.lines), tokenization.lost_characters(block.lines))


@contextmanager
def token_file_writer(path: Path, tokenization: Tokenization, text_name: str) -> Iterator[AddLines]:
    """Write a token file block by block; it appears, whole, only if the block of code ends without an error."""
    dtype = "uint16" if len(tokenization) <= 1 << 16 else "uint32"
    text_hash, tokens_hash = hashlib.sha256(), hashlib.sha256()
    sums = Counter(tokens=0, lines=0, bytes=0, unknown=0)
    characters = Counter(lost=0, looked_at=0)

    def add(ids: np.ndarray, raw: bytes, lines: int, lost: tuple[int, int]) -> None:
        ids = ids.astype(_DTYPES[dtype])
        file.write(ids.data)
        text_hash.update(raw)
        tokens_hash.update(ids.data)
        unknown = int(np.count_nonzero(ids == tokenization.unk_id))
        sums.update(tokens=len(ids), lines=lines, bytes=len(raw), unknown=unknown)
        characters.update(lost=lost[0], looked_at=lost[1])

    with atomic_file(path) as file:
        file.write(bytes(_DATA_OFFSET))
        yield add
        if sums["tokens"] < FEWEST_TOKENS:
            raise UserError(
                f"{text_name} has {sums['tokens']} token, but at least {FEWEST_TOKENS} are needed: add text."
            )
        header = TokenHeader(
            dtype=dtype,
            **sums,
            vocabulary_sha256=tokenization.sha256,
            text_sha256=text_hash.hexdigest(),
            tokens_sha256=tokens_hash.hexdigest(),
            lost_share=characters["lost"] / characters["looked_at"] if characters["looked_at"] else None,
        )
        length = _DATA_OFFSET - _PREFIX.size
        file.seek(0)
        file.write(_PREFIX.pack(MAGIC, VERSION, length) + json.dumps(asdict(header)).encode().ljust(length))
