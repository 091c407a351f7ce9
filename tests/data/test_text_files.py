import gzip
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchdefine.data import text_files
from torchdefine.data.sources import find_splits
from torchdefine.data.text_files import read_text
from torchdefine.errors import UserError

zstandard = pytest.importorskip("zstandard")

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".txt": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def lines_of(path: Path) -> list[str]:
    return [line for block in read_text(path) for line in block.lines]


@pytest.fixture
def text() -> bytes:
    return "".join(f"line {number} of the näive text\n" for number in range(3000)).encode()


@pytest.mark.parametrize("suffix", PACKERS)
def test_text_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, suffix: str) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1000)
    path = tmp_path / f"text{suffix}"
    path.write_bytes(PACKERS[suffix](text))
    blocks = list(read_text(path))
    assert b"".join(block.raw for block in blocks) == text
    assert [line for block in blocks for line in block.lines] == text.decode().split("\n")[:-1]
    assert 0 < sum(block.disk_bytes for block in blocks) <= path.stat().st_size
    if suffix != ".zst":  # which hands out what its own frames hold
        assert max(len(block.raw) for block in blocks) < 1000 + len("line 2999 of the näive text\n".encode())


def test_archives_of_several_parts_are_read_to_the_end(tmp_path: Path, text: bytes) -> None:
    for suffix in (".gz", ".xz", ".zst"):
        path = tmp_path / f"text{suffix}"
        path.write_bytes(PACKERS[suffix](text) + PACKERS[suffix](b"the end"))
        assert lines_of(path)[-2:] == ["line 2999 of the näive text", "the end"]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("a\nb", ["a", "b"]),
        ("a\n\nb\n", ["a", "", "b"]),
        ("\n", [""]),
        ("a\u2028b\x0bc\x85d\r\n", ["a\u2028b\x0bc\x85d\r"]),
        ("\ufeffa\n", ["a"]),
    ],
)
def test_lines_end_at_newlines_only(tmp_path: Path, content: str, lines: list[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content.encode())
    assert lines_of(path) == lines


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kept", [0.6, 0.999])
def test_truncated_archive_is_refused(tmp_path: Path, text: bytes, suffix: str, kept: float) -> None:
    path = tmp_path / f"text{suffix}"
    packed = PACKERS[suffix](text)
    path.write_bytes(packed[: int(len(packed) * kept)])
    with pytest.raises(UserError, match=rf"text\{suffix} is damaged or was cut short"):
        lines_of(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_text_called_an_archive_is_refused(tmp_path: Path, text: bytes, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(text)
    with pytest.raises(UserError, match=rf"text\{suffix} is damaged"):
        lines_of(path)


@pytest.mark.parametrize("suffix", PACKERS)
def test_empty_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(PACKERS[suffix](b""))
    with pytest.raises(UserError, match=rf"text\{suffix} is empty"):
        lines_of(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"text file .*absent\.txt does not exist"):
        lines_of(tmp_path / "absent.txt")
    with pytest.raises(UserError, match="is a folder"):
        lines_of(tmp_path)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="needs permissions that bind")
def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a")
    path.chmod(0)
    with pytest.raises(UserError, match=r"text\.txt cannot be opened"):
        lines_of(path)


@pytest.mark.parametrize(("bad", "kind", "byte"), [(b"\xff", "not UTF-8", "0xff"), (b"\0", "a binary file", "0x00")])
def test_binary_file_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: bytes, kind: str, byte: str
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 10)  # so that the place lies in a later block
    path = tmp_path / "text.txt"
    path.write_bytes(b"first\nsecond\nthi" + bad + b"rd\n")
    with pytest.raises(UserError, match=rf"text\.txt is {kind}.*line 3 has the byte {byte} at position 16"):
        lines_of(path)


def test_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(text_files, "LONGEST_LINE_BYTES", 1 << 20)
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * (1 << 20))
    assert lines_of(path) == ["a" * (1 << 20)]
    path.write_bytes(b"a" * ((1 << 20) + 1))
    with pytest.raises(UserError, match=r"text\.txt has a line of more than 1 MiB"):
        lines_of(path)


def test_zst_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.zst"
    path.write_bytes(PACKERS[".zst"](b"a\n"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"pip install 'torchdefine\[zst\]'"):
        lines_of(path)


def folder_of(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).write_text("text\n")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train.txt", "valid.txt", "test.txt"], {"train": 1, "valid": 1, "test": 1}),
        (["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"], {"train": 1, "valid": 1, "test": 1}),
        (["ptb.train.txt", "ptb.valid.txt"], {"train": 1, "valid": 1}),
        (["TRAIN.txt.xz", "dev.txt.xz", "my-test.gz"], {"train": 1, "valid": 1, "test": 1}),
        (["train.txt", "validation.txt"], {"train": 1, "valid": 1}),
        (["train.txt", "val.txt"], {"train": 1, "valid": 1}),
        (["train.txt", "device.txt", "values.txt", "latest.txt", ".test.txt.swp"], {"train": 1}),
    ],
)
def test_splits_are_found_by_name(tmp_path: Path, names: list[str], expected: dict[str, int]) -> None:
    splits = find_splits(folder_of(tmp_path, *names))
    assert {split: len(paths) for split, paths in splits.items()} == expected
    assert list(splits) == list(expected), "always in the order train, valid, test"


def test_a_link_to_nothing_is_no_missing_split(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train.txt")
    (folder / "notes.txt").symlink_to("nowhere.txt")  # no text of the corpus, and none of our business
    (folder / "test.txt").symlink_to("train.txt")
    assert list(find_splits(folder)) == ["train", "test"]
    (folder / "valid.txt").symlink_to("nowhere.txt")
    with pytest.raises(UserError, match=r"valid\.txt is a link to nowhere\.txt, which is not there"):
        find_splits(folder)


def test_parts_stand_in_natural_order(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train-10.txt.xz", "train-2.txt.xz", "train-1.txt.xz")
    assert [path.name for path in find_splits(folder)["train"]] == [
        "train-1.txt.xz",
        "train-2.txt.xz",
        "train-10.txt.xz",
    ]


@pytest.mark.parametrize(
    "names",
    [
        ["train.en", "train.de"],
        ["train.txt", "train.txt.gz"],
        ["train.txt", "train-1.txt"],
        ["train.txt", "valid.txt", "dev.txt"],
        ["train.test.txt"],
    ],
)
def test_ambiguous_names_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UserError, match="several") as caught:
        find_splits(folder_of(tmp_path, *names))
    assert names[-1] in str(caught.value)


def test_missing_training_text_lists_what_was_found(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "notes.md", "test.txt")
    with pytest.raises(UserError, match=r"no training file \(found: notes\.md, test\.txt\)"):
        find_splits(folder)
    assert list(find_splits(folder, require_train=False)) == ["test"]


def test_empty_folder_single_file_and_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found: no files"):
        find_splits(tmp_path)
    with pytest.raises(UserError, match="no train, valid or test file"):
        find_splits(tmp_path, require_train=False)
    with pytest.raises(UserError, match=r"single file, but a corpus is a folder"):
        find_splits(folder_of(tmp_path, "train.txt") / "train.txt")
    with pytest.raises(UserError, match=r"no folder .*absent"):
        find_splits(tmp_path / "absent")
