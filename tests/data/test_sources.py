import dataclasses
import logging
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from torchdefine.data.corpus import encode_corpus
from torchdefine.data.sources import NAMED_TEXTS, corpus_names, find_splits, resolve_corpus
from torchdefine.errors import MachineError, UserError
from torchdefine.files import locked


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive with WikiText-2's layout, at an address that can be reached here."""
    archive = tmp_path / "published" / "wikitext-2-v1.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as packed:
        for split in ("train", "valid", "test"):
            packed.writestr(f"wikitext-2/wiki.{split}.tokens", f"the {split} text\n")
    corpus = dataclasses.replace(NAMED_TEXTS["wikitext-2"], url=archive.as_uri())
    monkeypatch.setitem(NAMED_TEXTS, "wikitext-2", corpus)
    return archive


def test_shipped_sample_has_the_counts_of_wikitext_2(tmp_path: Path) -> None:
    corpus = encode_corpus(resolve_corpus("wikitext-2-shuffled"), cache=tmp_path)
    assert {split: len(file) for split, file in corpus.splits.items()} == {
        "train": 2_088_628,
        "valid": 217_646,
        "test": 245_569,
    }
    assert len(corpus.tokenization) == 33_278
    assert corpus.name == "wikitext-2-shuffled"


def test_shipped_corpora_carry_their_notice() -> None:
    assert "CC BY-SA" in (resolve_corpus("wikitext-2-shuffled") / "NOTICE.md").read_text()


def test_existing_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wikitext-2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_corpus("wikitext-2") == Path("wikitext-2")
    assert resolve_corpus(tmp_path) == tmp_path


def test_download_is_unpacked_once(published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        folder = resolve_corpus("wikitext-2", tmp_path / "cache")
    assert [path.name for paths in find_splits(folder).values() for path in paths] == [
        "train.txt",
        "valid.txt",
        "test.txt",
    ]
    assert (folder / "valid.txt").read_text() == "the valid text\n"
    assert "unverified" in caplog.text
    assert "CC BY-SA" in caplog.text
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "wikitext-2",
        "wikitext-2-v1.zip.sha256",
    ]
    published.unlink()
    assert resolve_corpus("wikitext-2", tmp_path / "cache") == folder


def test_damaged_download_does_not_stay(published: Path, tmp_path: Path) -> None:
    sound = published.read_bytes()
    published.write_bytes(b"no archive")
    with pytest.raises(MachineError, match="damaged"):
        resolve_corpus("wikitext-2", tmp_path / "cache")
    assert not (tmp_path / "cache" / "downloads" / "wikitext-2-v1.zip").exists()
    published.write_bytes(sound)
    assert (resolve_corpus("wikitext-2", tmp_path / "cache") / "train.txt").is_file()


def test_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(UserError, match=r"called wikitext2 \(did you mean wikitext-2\?\)") as caught:
        resolve_corpus("wikitext2")
    assert all(name in str(caught.value) for name in corpus_names())
    with pytest.raises(UserError, match="called zzz: known by name are"):
        resolve_corpus("zzz")


def test_single_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("text\n")
    with pytest.raises(UserError, match=r"train\.txt is a single file"):
        encode_corpus(resolve_corpus(path))


def test_who_waited_for_another_download_takes_what_it_brought(published: Path, tmp_path: Path) -> None:
    downloads = tmp_path / "cache" / "downloads"
    with ThreadPoolExecutor() as pool, ExitStack() as lock:
        lock.enter_context(locked(downloads / published.name))
        waiting = pool.submit(resolve_corpus, "wikitext-2", tmp_path / "cache")
        time.sleep(0.2)
        assert not waiting.done()
        for split in ("train", "valid", "test"):
            (downloads / "wikitext-2").mkdir(exist_ok=True)
            (downloads / "wikitext-2" / f"{split}.txt").write_text("of the other\n")
        published.unlink()
        lock.close()
        assert (waiting.result(10) / "test.txt").read_text() == "of the other\n"
