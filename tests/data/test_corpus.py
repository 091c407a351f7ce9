import errno
import io
import lzma
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

from torchdefine.data.corpus import Corpus, TextConfig, encode_corpus
from torchdefine.data.tokenizer import train_subwords
from torchdefine.data.vocabulary import EOS, Vocabulary
from torchdefine.errors import MachineError, UserError
from torchdefine.files import locked


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "train-1.txt").write_text("the cat sat\nthe cat\n")
    (folder / "train-2.txt").write_text("the end\n")
    (folder / "valid.txt").write_text("the dog sat\n")
    (folder / "test.txt.xz").write_bytes(lzma.compress(b"the end\n"))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, reading a text fails the test."""

    def read(path: Path) -> Iterator[None]:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr("torchdefine.data.text_files.read_text", read)


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_splits_are_encoded_with_the_words_of_the_training_text(source: Path, cache: Path) -> None:
    corpus = encode_corpus(source, cache=cache)
    assert corpus.name == "tiny"
    assert isinstance(corpus.tokenization, Vocabulary)
    # "the" and <eos> are seen three times each, and < sorts before t
    assert corpus.tokenization.tokens == [EOS, "the", "cat", "end", "sat", "<unk>"]
    assert {split: file.tokens.tolist() for split, file in corpus.splits.items()} == {
        "train": [1, 2, 4, 0, 1, 2, 0, 1, 3, 0],
        "valid": [1, 5, 4, 0],
        "test": [1, 3, 0],
    }
    assert corpus.splits["valid"].header.unknown == 1
    assert files_below(cache) == ["corpus.json", "test.tokens", "train.tokens", "valid.tokens", "vocab.txt"]


def test_second_call_does_not_read_the_text(source: Path, cache: Path, request: pytest.FixtureRequest) -> None:
    first = encode_corpus(source, cache=cache)
    request.getfixturevalue("no_reading")
    again = encode_corpus(source, cache=cache)
    assert again.folder == first.folder
    assert again.splits["train"].tokens.tolist() == first.splits["train"].tokens.tolist()


def test_changed_text_and_changed_settings_are_encoded_anew(source: Path, cache: Path) -> None:
    folders = {encode_corpus(source, cache=cache).folder}
    folders.add(encode_corpus(source, TextConfig(min_count=2), cache).folder)
    folders.add(encode_corpus(source, TextConfig(max_size=4), cache).folder)
    (source / "valid.txt").write_text("the cat end\n")  # as long as before
    os.utime(source / "valid.txt", ns=(1, 1))
    changed = encode_corpus(source, cache=cache)
    assert changed.splits["valid"].header.unknown == 0
    assert len(folders | {changed.folder}) == 4


def test_min_count_and_max_size_reach_the_vocabulary(source: Path, cache: Path) -> None:
    corpus = encode_corpus(source, TextConfig(min_count=2), cache)
    assert isinstance(corpus.tokenization, Vocabulary)
    assert corpus.tokenization.tokens == [EOS, "the", "<unk>", "cat"]
    assert len(encode_corpus(source, TextConfig(max_size=3), cache).tokenization) == 3


def test_existing_vocabulary_needs_no_training_text(source: Path, cache: Path) -> None:
    vocabulary = Vocabulary.from_counts({"dog": 2, "the": 1, EOS: 1})
    assert encode_corpus(source, cache=cache, vocabulary=vocabulary).splits["valid"].tokens.tolist() == [2, 0, 3, 1]
    for part in source.glob("train-*"):
        part.unlink()
    corpus = encode_corpus(source, cache=cache, vocabulary=vocabulary)
    assert list(corpus.splits) == ["valid", "test"]
    with pytest.raises(UserError, match="no training file"):
        encode_corpus(source, cache=cache)


def test_tokenizer_file_gives_subwords(source: Path, cache: Path, tmp_path: Path) -> None:
    tokenizer = train_subwords([source / "train-1.txt"], 270)
    file = tokenizer.save(tmp_path / "bpe.json")
    corpus = encode_corpus(source, TextConfig(tokenizer=file), cache)
    assert corpus.tokenization.kind == "subwords"
    assert corpus.splits["valid"].tokens.tolist() == tokenizer.encode("the dog sat\n")
    assert encode_corpus(source, cache=cache, vocabulary=tokenizer).folder == corpus.folder


def test_an_encoded_folder_takes_the_place_of_its_text(
    source: Path, cache: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    made = encode_corpus(source, TextConfig(min_count=2), cache, out=tmp_path / "made")
    assert not cache.exists()
    direct = encode_corpus(source, TextConfig(min_count=2), cache)
    assert files_below(made.folder) == files_below(direct.folder)
    moved = made.folder.rename(tmp_path / "moved")
    request.getfixturevalue("no_reading")
    opened = encode_corpus(moved, TextConfig(min_count=2), cache)
    assert (opened.name, opened.folder, opened.different_words) == ("tiny", moved, 4)
    for split, file in direct.splits.items():
        assert opened.splits[split].header == file.header
    same_words = encode_corpus(moved, cache=cache, vocabulary=direct.tokenization, split="test")
    assert same_words.splits["test"].tokens.tolist() == direct.splits["test"].tokens.tolist()


def test_an_encoded_folder_is_refused_where_something_else_is_wanted(source: Path, cache: Path, tmp_path: Path) -> None:
    words = encode_corpus(source, TextConfig(min_count=2), cache, out=tmp_path / "words").folder
    sentence = r"words was encoded with data\.min_count 2 and data\.max_size none, but data\.min_count 1 and"
    with pytest.raises(UserError, match=sentence):
        encode_corpus(words, cache=cache)
    with pytest.raises(UserError, match="another vocabulary"):
        encode_corpus(words, cache=cache, vocabulary=Vocabulary.from_counts({"a": 1}))
    with pytest.raises(UserError, match="encoded already"):
        encode_corpus(words, TextConfig(min_count=2), cache, out=tmp_path / "again")
    with pytest.raises(UserError, match="exists already and is not empty"):
        encode_corpus(source, cache=cache, out=words)
    tokenizer = train_subwords([source / "train-1.txt"], 270)
    subwords = encode_corpus(source, cache=cache, vocabulary=tokenizer, out=tmp_path / "subwords").folder
    with pytest.raises(UserError, match=r"set data\.tokenizer to .*subwords/tokenizer\.json"):
        encode_corpus(subwords, cache=cache)
    assert encode_corpus(subwords, TextConfig(tokenizer=subwords / "tokenizer.json"), cache).folder == subwords
    for part in source.glob("train-*"):
        part.unlink()
    rest = encode_corpus(source, cache=cache, vocabulary=tokenizer, out=tmp_path / "rest").folder
    with pytest.raises(UserError, match="rest has no train text: it has valid, test"):
        encode_corpus(rest, cache=cache, vocabulary=tokenizer, split="train")


def test_nothing_is_left_of_an_encoding_that_failed(source: Path, cache: Path, tmp_path: Path) -> None:
    (source / "valid.txt").write_bytes(b"a\0b\n")
    with pytest.raises(UserError, match="binary file"):
        encode_corpus(source, cache=cache, out=tmp_path / "out" / "tokens")
    assert not list((tmp_path / "out").iterdir())


def test_a_file_of_ones_own_called_like_the_manifest_does_no_harm(source: Path, cache: Path) -> None:
    for own in ("{}", "[1]", "not JSON", '{"name": "mine"}'):
        (source / "corpus.json").write_text(own)
        assert encode_corpus(source, cache=cache).name == "tiny"


def test_bad_choices_are_refused(source: Path, cache: Path) -> None:
    with pytest.raises(UserError, match="give it"):
        encode_corpus(source, cache=cache, split="valid")
    with pytest.raises(UserError, match=r"tokenizer file bpe\.json does not exist"):
        encode_corpus(source, TextConfig(tokenizer="bpe.json"), cache)
    for wrong in ({"max_size": 2}, {"min_count": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            TextConfig(**wrong)


def test_the_rule_for_words_is_not_for_subwords_or_words_that_exist(source: Path, cache: Path, tmp_path: Path) -> None:
    file = train_subwords([source / "train-1.txt"], 270).save(tmp_path / "bpe.json")
    plain, ruled = (encode_corpus(source, TextConfig(tokenizer=file, min_count=n), cache) for n in (1, 2))
    assert plain.folder == ruled.folder
    vocabulary = Vocabulary.from_counts({"dog": 2, "the": 1, EOS: 1})
    plain, ruled = (encode_corpus(source, TextConfig(min_count=n), cache, vocabulary=vocabulary) for n in (1, 2))
    assert plain.folder == ruled.folder


@pytest.mark.parametrize(
    ("split", "text", "sentence"),
    [
        ("train-2.txt", "", r"train-2\.txt is empty"),
        ("valid.txt", "\n", r"valid\.txt has 1 token"),
        ("valid.txt", "a\0b\n", r"valid\.txt is a binary file"),
    ],
)
def test_unusable_text_is_refused_and_leaves_no_corpus(
    source: Path, cache: Path, split: str, text: str, sentence: str
) -> None:
    (source / split).write_text(text)
    with pytest.raises(UserError, match=sentence):
        encode_corpus(source, cache=cache)
    assert "corpus.json" not in files_below(cache)


def test_training_text_without_words_is_refused(source: Path, cache: Path) -> None:
    for part in source.glob("train-*"):
        part.write_text("\n\n")
    with pytest.raises(UserError, match=r"train-1\.txt has no word that is seen 1 times or more"):
        encode_corpus(source, cache=cache)
    assert not files_below(cache)


def test_damaged_cache_is_made_again(source: Path, cache: Path) -> None:
    corpus = encode_corpus(source, cache=cache)
    expected = corpus.splits["train"].tokens.tolist()
    corpus.splits["train"].path.write_bytes(b"TDTOKENS")
    with pytest.raises(UserError, match=r"train\.tokens is damaged"):
        Corpus.open(corpus.folder)
    assert encode_corpus(source, cache=cache).splits["train"].tokens.tolist() == expected


@pytest.mark.parametrize("name", ["valid.tokens", "vocab.txt", "corpus.json"])
def test_a_flipped_bit_in_the_cache_is_noticed_and_made_good(source: Path, cache: Path, name: str) -> None:
    folder = encode_corpus(source, cache=cache).folder
    sound = (folder / name).read_bytes()
    for at in (0, len(sound) // 2, len(sound) - 2):
        flipped = bytearray(sound)
        flipped[at] ^= 2
        (folder / name).write_bytes(flipped)
        with pytest.raises(UserError, match=r"damaged|another vocabulary"):
            Corpus.open(folder).splits["valid"].tokens.tolist()
        encode_corpus(source, cache=cache)
        assert (folder / name).read_bytes() == sound


def test_a_text_in_the_place_of_one_of_the_same_size_and_time_is_encoded(source: Path, cache: Path) -> None:
    before, times = encode_corpus(source, cache=cache), (source / "valid.txt").stat()
    own = (source / "valid.txt").read_text()
    (source / "valid.txt").write_text(own[::-1].strip() + "\n")
    os.utime(source / "valid.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (source / "valid.txt").stat().st_size == times.st_size
    after = encode_corpus(source, cache=cache)
    assert after.splits["valid"].tokens_sha256 != before.splits["valid"].tokens_sha256


def test_open_refuses_what_does_not_belong_together(source: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder with an encoded corpus"):
        Corpus.open(tmp_path)
    folder = encode_corpus(source, cache=cache).folder
    Vocabulary.from_counts({"other": 1}).save(folder)
    with pytest.raises(UserError, match="was encoded with another vocabulary than the one beside it"):
        Corpus.open(folder)
    (folder / "corpus.json").write_text('{"version": 3, "name": "tiny", "splits": {}}')
    with pytest.raises(UserError, match="of another format version than 2"):
        Corpus.open(folder)


def test_full_disk_leaves_nothing_half_written(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallDisk(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_on_small_disk(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
        return SmallDisk(path, "x") if mode == "xb" else open_path(path, mode, **options)

    open_path = Path.open
    monkeypatch.setattr(Path, "open", open_on_small_disk)
    with pytest.raises(MachineError, match=r"disk is full.*train\.tokens"):
        encode_corpus(source, cache=cache)
    assert files_below(cache) == []


def test_progress_grows_to_the_total(source: Path, cache: Path) -> None:
    calls: list[tuple[int, int]] = []
    encode_corpus(source, cache=cache, progress=lambda done, total: calls.append((done, total)))
    sizes = {path.name: path.stat().st_size for path in source.iterdir()}
    total = sum(sizes.values()) + sizes["train-1.txt"] + sizes["train-2.txt"]  # the training text is read twice
    assert calls == sorted(calls)
    assert len(calls) >= 6
    assert calls[-1] == (total, total)


def test_concurrent_encoding_gives_one_whole_corpus(source: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        corpora = list(pool.map(lambda _: encode_corpus(source, cache=cache), range(4)))
    for corpus in corpora:
        corpus.splits["train"].verify()
        assert len(corpus.splits["train"]) == 10
    assert len(files_below(cache)) == 5


def test_who_waited_for_another_encoding_opens_it(
    source: Path, cache: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = encode_corpus(source, cache=cache).folder
    folder.rename(tmp_path / "away")
    request.getfixturevalue("no_reading")
    with ThreadPoolExecutor() as pool:
        with locked(folder):
            waiting = pool.submit(encode_corpus, source, None, cache)
            time.sleep(0.2)
            assert not waiting.done()
            (tmp_path / "away").rename(folder)
        assert waiting.result(10).folder == folder


def test_cache_comes_from_the_environment(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDEFINE_CACHE", str(cache))
    assert encode_corpus(source).folder.parent == cache / "corpora"


def test_blocks_do_not_change_the_tokens(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encode_corpus(source, cache=cache).splits["train"].tokens.tolist()
    monkeypatch.setattr("torchdefine.data.text_files.BLOCK_BYTES", 3)
    assert encode_corpus(source, cache=tmp_path / "other").splits["train"].tokens.tolist() == whole


def test_counting_agrees_with_a_plain_loop(source: Path, cache: Path) -> None:
    vocabulary = encode_corpus(source, cache=cache).tokenization
    text = (source / "train-1.txt").read_text() + (source / "train-2.txt").read_text()
    counts = Counter(word for line in text.split("\n")[:-1] for word in [*line.split(), EOS])
    assert isinstance(vocabulary, Vocabulary)
    assert dict(zip(vocabulary.tokens, vocabulary.counts, strict=True)) == {**counts, "<unk>": 0}
