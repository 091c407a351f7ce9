import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from torchdefine.data import token_file
from torchdefine.data.token_file import TokenFile, write_token_file
from torchdefine.data.vocabulary import EOS, UNK, Vocabulary
from torchdefine.errors import UserError

VOCABULARY = Vocabulary.from_counts({"the": 9, "cat": 5, EOS: 4})
TEXTS = ["the cat\nthe dog\n", "cat ü"]  # the second part lacks its last newline


@pytest.fixture
def token_path(tmp_path: Path) -> Path:
    texts = [tmp_path / f"{number}.txt" for number in range(len(TEXTS))]
    for path, text in zip(texts, TEXTS, strict=True):
        path.write_bytes(text.encode())
    target = tmp_path / "train.tokens"
    write_token_file(target, texts, VOCABULARY, advance=lambda _: None)
    return target


def test_tokens_and_header(token_path: Path) -> None:
    file = TokenFile.open(token_path)
    assert file.tokens.tolist() == [0, 1, 2, 0, 3, 2, 1, 3, 2]
    assert isinstance(file.tokens, np.memmap)
    assert len(file) == 9
    text = "".join(TEXTS).encode()
    assert dataclasses.asdict(file.header) == {
        "dtype": "uint16",
        "tokens": 9,
        "lines": 3,
        "bytes": len(text),
        "unknown": 2,
        "vocabulary_sha256": VOCABULARY.sha256,
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "tokens_sha256": hashlib.sha256(np.array(file.tokens, dtype="<u2").tobytes()).hexdigest(),
        "lost_share": 0.0,
    }
    file.verify()


@pytest.mark.parametrize("read_at_once", [1, 4, 100])
def test_tokens_are_counted_and_verified_part_by_part(
    token_path: Path, read_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "_READ_AT_ONCE", read_at_once)
    file = TokenFile.open(token_path)
    assert file.counts(5).tolist() == [2, 2, 3, 2, 0]
    file.verify()


def test_layout_is_as_documented(token_path: Path) -> None:
    content = token_path.read_bytes()
    assert content[:8] == b"TDTOKENS"
    assert int.from_bytes(content[8:12], "little") == 1
    begin = 16 + int.from_bytes(content[12:16], "little")
    assert begin % 64 == 0
    assert json.loads(content[16:begin])["tokens"] == 9
    assert content[begin:] == np.array([0, 1, 2, 0, 3, 2, 1, 3, 2], dtype="<u2").tobytes()


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_width_follows_the_vocabulary(tmp_path: Path, size: int, dtype: str) -> None:
    words = [f"w{number}" for number in range(size - 2)]
    vocabulary = Vocabulary([*words, EOS, UNK], [1] * size)
    text = tmp_path / "text.txt"
    text.write_text("w0 outside\n")
    write_token_file(tmp_path / "tokens", [text], vocabulary, advance=lambda _: None)
    file = TokenFile.open(tmp_path / "tokens")
    assert (file.header.dtype, file.tokens.dtype) == (dtype, np.dtype(dtype))
    assert file.tokens.tolist() == [0, size - 1, size - 2]


def test_truncated_or_grown_file_is_refused(token_path: Path) -> None:
    content = token_path.read_bytes()
    for damaged in (content[:-1], content + b"\0", content[:500], content[:12]):
        token_path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"train\.tokens is damaged .*delete it"):
            TokenFile.open(token_path)


def test_foreign_newer_and_missing_files_are_refused(token_path: Path) -> None:
    content = token_path.read_bytes()
    token_path.write_bytes(b"something else entirely")
    with pytest.raises(UserError, match=r"train\.tokens is not a token file"):
        TokenFile.open(token_path)
    token_path.write_bytes(content[:8] + b"\2" + content[9:])
    with pytest.raises(UserError, match=r"train\.tokens has format version 2"):
        TokenFile.open(token_path)
    token_path.unlink()
    with pytest.raises(UserError, match=r"train\.tokens cannot be opened"):
        TokenFile.open(token_path)


@pytest.mark.parametrize(
    ("old", "new"), [(b"{", b"["), (b"uint16", b"uint17"), (b'"tokens"', b'"tokenz"'), (b" 9,", b'"",')]
)
def test_damaged_header_is_refused(token_path: Path, old: bytes, new: bytes) -> None:
    content = token_path.read_bytes()
    assert old in content
    token_path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(UserError, match=r"train\.tokens is damaged"):
        TokenFile.open(token_path)


def test_verify_finds_a_changed_token(token_path: Path) -> None:
    content = bytearray(token_path.read_bytes())
    content[-1] ^= 1
    token_path.write_bytes(content)
    file = TokenFile.open(token_path)
    with pytest.raises(UserError, match=r"train\.tokens is damaged"):
        file.verify()


def test_text_of_one_token_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "valid.txt"
    text.write_text("\n")
    with pytest.raises(UserError, match=r"valid\.txt has 1 token"):
        write_token_file(tmp_path / "tokens", [text], VOCABULARY, advance=lambda _: None)
    assert list(tmp_path.iterdir()) == [text]
