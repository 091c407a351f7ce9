"""A text as token ids: files of nothing but ids, mapped from the disk, and the manifest that describes them.

A folder of the cache, or one that the caller names, has

    corpus.json (a bitext's: bitext.json)    the format version, the name, the hash of the tokenization, and for every
                                             split the header of each of its token files, with the hash of its ids;
                                             sealed by a hash of itself, and written last
    vocab.txt or tokenizer.json              the tokenization
    train.tokens  valid.tokens  test.tokens  the ids, little-endian: uint16 where the vocabulary has at most 65,536
                                             tokens, else uint32
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from torchdefine.data.tokenizer import SOURCE_FILE, TARGET_FILE, TOKENIZER_FILE, TokenizerPair
from torchdefine.data.vocabulary import VOCABULARY_FILE, Tokenization
from torchdefine.errors import UserError
from torchdefine.files import check_is_file, locked, open_failure, read_sealed, sha256_of, write_sealed
from torchdefine.spelling import option

E = TypeVar("E", bound="Encoded")
S = TypeVar("S")
T = TypeVar("T", Tokenization, TokenizerPair)

VERSION = 2
FEWEST_TOKENS = 2
DTYPES = ("uint16", "uint32")
LOSS_THAT_COUNTS = 0.001
"""Fraction of a text's characters; a model is credited with the bytes of those, too, that its tokenizer drops."""

_READ_AT_ONCE = 16 << 20  # tokens


@dataclass(frozen=True)
class TokenHeader:
    """What is known of a token file without reading it."""

    dtype: str
    tokens: int
    lines: int
    bytes: int
    """The text's size in UTF-8, newlines included, for bits per byte."""
    unknown: int
    """How many of the tokens are ``<unk>``."""
    text_sha256: str
    """Of the unpacked bytes of all the text's files, in order."""
    tokens_sha256: str
    """Of the file."""
    lost_share: float | None
    """How many of the text's characters the tokens do not tell, by a sample; None for a bitext."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file, mapped from the disk."""

    path: Path
    header: TokenHeader
    vocabulary_size: int
    _mapped: np.memmap

    @classmethod
    def open(cls, path: Path, header: TokenHeader, vocabulary_size: int) -> TokenFile:
        check_is_file(path, "token file")
        try:
            tokens: np.memmap = np.memmap(path, np.dtype(header.dtype).newbyteorder("<"), mode="r")
        except OSError as error:
            raise open_failure(path, error, "check its permissions", "token file") from error
        except ValueError as error:
            raise _damaged(path, "it is empty or ends within a token") from error
        if len(tokens) != header.tokens:
            raise _damaged(path, f"it has {len(tokens):,} tokens where {header.tokens:,} were written")
        return cls(path, header, vocabulary_size, tokens)

    @cached_property
    def tokens(self) -> np.memmap:
        """The ids, compared with the header's hash block by block before the first of them is used."""
        digest = hashlib.sha256()
        for _, part in self._parts():
            digest.update(part.data)
            if part.max() >= self.vocabulary_size:
                raise _damaged(self.path, "it has ids that are not in the vocabulary")
        if digest.hexdigest() != self.header.tokens_sha256:
            raise _damaged(self.path, "its tokens are not those that were written")
        return self._mapped

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
        """Refuse a file whose ids are not those that were written, as the first use of them does."""
        _ = self.tokens

    def counts(self, vocabulary_size: int) -> np.ndarray:
        """How often each id occurs, (V,)."""
        counts = np.zeros(vocabulary_size, np.int64)
        self.verify()
        for _, part in self._parts():
            counts += np.bincount(part, minlength=vocabulary_size)
        return counts

    def ends(self, eos_id: int) -> np.ndarray:
        """Where each line ends, its ``<eos>`` included, (lines,); it begins where the one before ends."""
        self.verify()
        ends = np.concatenate([np.flatnonzero(part == eos_id) + start + 1 for start, part in self._parts()])
        if len(ends) != self.header.lines:
            raise _damaged(self.path, f"it has {len(ends):,} lines where {self.header.lines:,} were written")
        return ends

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """The tokens as much at a time as memory should hold, and where each part starts."""
        for start in range(0, len(self), _READ_AT_ONCE):
            yield start, self._mapped[start : start + _READ_AT_ONCE]


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"The token file {path} is damaged ({reason}): delete it to encode the text again, or copy it again."
    )


class TokenWriter:
    """Writes ids into an open file, block by block, and adds up their header."""

    def __init__(self, file: BinaryIO, tokenization: Tokenization) -> None:
        self._file, self._unk_id = file, tokenization.unk_id
        self._dtype = DTYPES[len(tokenization) > 1 << 16]
        self._text, self._tokens = hashlib.sha256(), hashlib.sha256()
        self.sums = Counter(tokens=0, lines=0, bytes=0, unknown=0)
        self._lost = np.zeros(2, np.int64)

    def add(self, ids: np.ndarray, raw: bytes, lines: int, lost: tuple[int, int] = (0, 0)) -> None:
        """Take the ids of some lines, each ended by ``<eos>``, their bytes, their number and ``lost_characters``."""
        ids = ids.astype(np.dtype(self._dtype).newbyteorder("<"))
        self._file.write(ids.data)
        self._text.update(raw)
        self._tokens.update(ids.data)
        unknown = int(np.count_nonzero(ids == self._unk_id))
        self.sums.update(tokens=len(ids), lines=lines, bytes=len(raw), unknown=unknown)
        self._lost += lost

    def header(self, text_name: str) -> TokenHeader:
        """What was written; a text of fewer than two tokens is refused."""
        if (tokens := self.sums["tokens"]) < FEWEST_TOKENS:
            raise UserError(f"{text_name} has {tokens} token, but at least {FEWEST_TOKENS} are needed: add text.")
        lost, looked_at = self._lost.tolist()
        return TokenHeader(
            dtype=self._dtype,
            **self.sums,
            text_sha256=self._text.hexdigest(),
            tokens_sha256=self._tokens.hexdigest(),
            lost_share=lost / looked_at if looked_at else None,
        )


Headers = dict[str, TokenHeader]
"""Those of the token files of a split by their names."""


def write_manifest(path: Path, name: str, vocabulary_sha256: str, splits: Mapping[str, Headers], **facts: Any) -> None:
    """Bind the files of an encoded text, and the tokenization that was saved beside them, to each other."""
    headers = {split: {file: asdict(header) for file, header in files.items()} for split, files in splits.items()}
    facts |= {"version": VERSION, "name": name, "vocabulary_sha256": vocabulary_sha256, "splits": headers}
    write_sealed(path, {**facts, "tokenization": _hashes_of_tokenization(path.parent)})


def _hashes_of_tokenization(folder: Path) -> dict[str, str]:
    """Of the files that are there, for they hold more than ids: how often words occur."""
    names = (VOCABULARY_FILE, TOKENIZER_FILE, SOURCE_FILE, TARGET_FILE)
    return {name: sha256_of(folder / name) for name in names if (folder / name).is_file()}


def read_manifest(path: Path) -> dict[str, Any]:
    """What ``write_manifest`` wrote."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        facts = read_sealed(path, "encode the text again")
        for files in facts["splits"].values():
            files.update({name: TokenHeader(**header) for name, header in files.items()})
            if any(Path(name).name != name or header.dtype not in DTYPES for name, header in files.items()):
                raise ValueError
        if facts["version"] == VERSION and {"name", "vocabulary_sha256", "tokenization"} <= facts.keys():
            return facts
    problem = f"{path.name} is missing, damaged or of another format version than {VERSION}"
    raise UserError(f"{path.parent} is not a folder with an encoded {path.stem}: {problem}; encode the text again.")


def open_encoded(path: Path, load: Callable[[Path], T]) -> tuple[dict[str, Any], T, dict[str, list[TokenFile]]]:
    """What a manifest says, the tokenization beside it and the token files of each split."""
    facts, folder = read_manifest(path), path.parent
    if facts["tokenization"] != _hashes_of_tokenization(folder):
        raise UserError(f"{folder} was encoded with another vocabulary than the one beside it: delete the folder.")
    tokenization = load(folder)
    sides = (tokenization.source, tokenization.target) if isinstance(tokenization, TokenizerPair) else (tokenization,)
    size = max(map(len, sides))
    splits = {
        split: [TokenFile.open(folder / name, header, size) for name, header in files.items()]
        for split, files in facts["splits"].items()
    }
    return facts, tokenization, splits


class Encoded(Protocol):
    """An encoded text; each of its splits can ``verify()`` itself."""

    @property
    def splits(self) -> Mapping[str, Any]: ...


def encoded_once(
    place: Path,
    texts: Mapping[str, Sequence[Path]],
    settings: Sequence[Any],
    open_folder: Callable[[Path], E],
    encode: Callable[[Path], None],
) -> E:
    """Open the folder of the cache for texts and settings; one that is not there, or is damaged, is filled first."""
    files = {split: [(str(path.resolve()), *_state_of(path)) for path in paths] for split, paths in texts.items()}
    key = hashlib.sha256(json.dumps([VERSION, files, settings]).encode()).hexdigest()
    folder = place.with_name(f"{place.name}-{key[:16]}")

    def opened() -> E:
        found = open_folder(folder)
        for text in found.splits.values():
            text.verify()
        return found

    with suppress(UserError):
        return opened()
    with locked(folder):
        with suppress(UserError):  # another process may have filled it
            return opened()
        encode(folder)
        return opened()


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes whenever a file does, even where another of the same size and time takes its place."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def only(split: str | None, splits: Mapping[str, S], source: Path) -> Mapping[str, S]:
    """One of the splits, or all of them."""
    if split is not None and split not in splits:
        found = ", ".join(splits)
        raise UserError(f"{source} has no {split} text: it has {found}; name another text by {option('data')}.")
    return splits if split is None else {split: splits[split]}
