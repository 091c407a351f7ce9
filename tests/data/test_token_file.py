import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from torchdefine.data import token_file
from torchdefine.data.token_file import TokenFile, TokenHeader, TokenWriter, read_manifest, write_manifest
from torchdefine.data.vocabulary import EOS, UNK, Vocabulary
from torchdefine.errors import UserError
from torchdefine.files import atomic_file

VOCABULARY = Vocabulary.from_counts({"the": 9, "cat": 5, EOS: 4})
TEXTS = ["the cat\nthe dog\n", "cat ü"]  # the second part lacks its last newline


@pytest.fixture
def token_path(tmp_path: Path) -> Path:
    return tmp_path / "train.tokens"


def write_tokens(path: Path, texts: list[str], vocabulary: Vocabulary = VOCABULARY) -> TokenHeader:
    with atomic_file(path) as file:
        writer = TokenWriter(file, vocabulary)
        for text in texts:
            lines = text.removesuffix("\n").split("\n")
            writer.add(vocabulary.encode_lines(lines), text.encode(), len(lines), vocabulary.lost_characters(lines))
        return writer.header("the text")


@pytest.fixture
def header(token_path: Path) -> TokenHeader:
    return write_tokens(token_path, TEXTS)


def test_tokens_and_header(token_path: Path, header: TokenHeader) -> None:
    file = TokenFile.open(token_path, header, 5)
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
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "tokens_sha256": hashlib.sha256(np.array(file.tokens, dtype="<u2").tobytes()).hexdigest(),
        "lost_share": 0.0,
    }
    file.verify()


@pytest.mark.parametrize("read_at_once", [1, 4, 100])
def test_tokens_are_counted_and_verified_part_by_part(
    token_path: Path, header: TokenHeader, read_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "_READ_AT_ONCE", read_at_once)
    file = TokenFile.open(token_path, header, 5)
    assert file.counts(5).tolist() == [2, 2, 3, 2, 0]
    file.verify()


def test_layout_is_as_documented(token_path: Path, header: TokenHeader) -> None:
    assert token_path.read_bytes() == np.array([0, 1, 2, 0, 3, 2, 1, 3, 2], dtype="<u2").tobytes()


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_width_follows_the_vocabulary(tmp_path: Path, size: int, dtype: str) -> None:
    words = [f"w{number}" for number in range(size - 2)]
    vocabulary = Vocabulary([*words, EOS, UNK], [1] * size)
    header = write_tokens(tmp_path / "tokens", ["w0 outside\n"], vocabulary)
    file = TokenFile.open(tmp_path / "tokens", header, size)
    assert (header.dtype, file.tokens.dtype) == (dtype, np.dtype(dtype))
    assert file.tokens.tolist() == [0, size - 1, size - 2]


def test_truncated_grown_and_missing_files_are_refused(token_path: Path, header: TokenHeader) -> None:
    content = token_path.read_bytes()
    for damaged in (content[:-1], content[:-2], content + b"\0", content + b"\0\0", b""):
        token_path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"train\.tokens is damaged .*delete it"):
            TokenFile.open(token_path, header, 5)
    token_path.unlink()
    with pytest.raises(UserError, match=r"train\.tokens does not exist"):
        TokenFile.open(token_path, header, 5)


@pytest.mark.parametrize(
    ("old", "new"),
    [("{", "["), ('"version": 2', '"version": 3'), ('"tokens"', '"tokenz"'), ('"name"', '"nome"'), ('"lines"', "[")],
)
def test_foreign_newer_and_damaged_manifests_are_refused(
    tmp_path: Path, header: TokenHeader, old: str, new: str
) -> None:
    path = tmp_path / "corpus.json"
    write_manifest(path, "mine", VOCABULARY.sha256, {"train": {"train.tokens": header}}, left_out=3)
    read = read_manifest(path)
    assert (read["name"], read["splits"], read["left_out"]) == ("mine", {"train": {"train.tokens": header}}, 3)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=r"not a folder with an encoded corpus: corpus\.json is missing, damaged or of"):
        read_manifest(path)


def test_verify_finds_a_changed_token(token_path: Path, header: TokenHeader) -> None:
    content = bytearray(token_path.read_bytes())
    content[-1] ^= 1
    token_path.write_bytes(content)
    file = TokenFile.open(token_path, header, 5)
    with pytest.raises(UserError, match=r"train\.tokens is damaged"):
        file.verify()


def test_no_number_of_a_changed_file_is_used(token_path: Path, header: TokenHeader) -> None:
    content = bytearray(token_path.read_bytes())
    content[0] ^= 1
    token_path.write_bytes(content)
    for use in (lambda file: file.tokens, lambda file: file.counts(5), lambda file: file.ends(2)):
        with pytest.raises(UserError, match=r"train\.tokens is damaged"):
            use(TokenFile.open(token_path, header, 5))


def test_ids_outside_the_vocabulary_and_other_numbers_of_lines_are_refused(
    token_path: Path, header: TokenHeader
) -> None:
    with pytest.raises(UserError, match="ids that are not in the vocabulary"):
        TokenFile.open(token_path, header, 3).verify()
    with pytest.raises(UserError, match="lines where 4 were written"):
        TokenFile.open(token_path, dataclasses.replace(header, lines=4), 5).ends(2)


@pytest.mark.parametrize("change", [{"dtype": "O"}, {"dtype": "uint8"}])
def test_manifests_name_only_files_beside_them_and_whole_numbers(
    tmp_path: Path, header: TokenHeader, change: dict
) -> None:
    path = tmp_path / "corpus.json"
    for name, own in (("../train.tokens", header), ("train.tokens", dataclasses.replace(header, **change))):
        write_manifest(path, "mine", VOCABULARY.sha256, {"train": {name: own}})
        with pytest.raises(UserError, match="damaged"):
            read_manifest(path)


def test_text_of_one_token_is_refused(token_path: Path) -> None:
    with pytest.raises(UserError, match=r"the text has 1 token"):
        write_tokens(token_path, ["\n"])
    assert not token_path.exists()
