from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdefine.data.vocabulary import EOS, UNK, Vocabulary, split_words
from torchdefine.errors import MachineError, UserError

COUNTS = {"the": 5, "cat": 2, "bat": 2, "sat": 1, EOS: 3}

words = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda word: word.split() == [word] and word != EOS)


def test_order_is_by_frequency_then_alphabet() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS)
    assert vocabulary.tokens == ["the", EOS, "bat", "cat", "sat", UNK]
    assert vocabulary.counts == [5, 3, 2, 2, 1, 0]
    assert (vocabulary.eos_id, vocabulary.unk_id) == (1, 5)
    assert Vocabulary.from_counts({"cab": 1, "ab": 1, "bad": 1}).tokens == ["ab", "bad", "cab", EOS, UNK]


def test_dropped_words_are_counted_as_unknown() -> None:
    vocabulary = Vocabulary.from_counts({**COUNTS, UNK: 1}, min_count=2)
    assert vocabulary.tokens == [
        "the",
        EOS,
        UNK,
        "bat",
        "cat",
    ]  # <unk>: 1 of its own, 1 of "sat"; before "bat"
    assert vocabulary.counts == [5, 3, 2, 2, 2]


def test_max_size_counts_the_specials() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS, max_size=3)
    assert vocabulary.tokens == [UNK, "the", EOS]
    assert sum(vocabulary.counts) == sum(COUNTS.values())


def test_words_and_ids() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS)
    assert [vocabulary.id(token) for token in vocabulary.tokens] == list(range(6))
    assert vocabulary.id("dog") == vocabulary.unk_id
    assert vocabulary.token(0) == "the"
    for outside in (-1, 6):
        with pytest.raises(IndexError, match=str(outside)):
            vocabulary.token(outside)


def test_text_to_ids_and_back() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS)
    ids = vocabulary.encode("the  cat\r\n\nthe dog\n")
    assert ids == [0, 3, 1, 1, 0, 5, 1]
    assert vocabulary.decode(ids) == "the cat\n\nthe <unk>\n"
    assert vocabulary.encode("the") == [0, 1], "a last line without a newline is a line too"
    assert vocabulary.encode("") == []


def test_only_newlines_end_lines() -> None:
    assert split_words(["a\u2028b\x0bc", "d"]) == ["a", "b", "c", EOS, "d", EOS]


@given(st.lists(st.lists(words, max_size=5), min_size=1, max_size=5))
def test_encoding_round_trip(lines: list[list[str]]) -> None:
    text = "".join(" ".join(line) + "\n" for line in lines)
    vocabulary = Vocabulary.from_counts(Counter(split_words(text.split("\n")[:-1])))
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_save_and_load(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts({**COUNTS, "naïve": 4, "#": 1})
    path = vocabulary.save(tmp_path)
    assert path == tmp_path / "vocab.txt"
    assert path.read_text(encoding="utf-8").startswith("# torchdefine vocabulary 1\t8\nthe\t5\n")
    loaded = Vocabulary.load(path)
    assert (loaded.tokens, loaded.counts, loaded.sha256) == (
        vocabulary.tokens,
        vocabulary.counts,
        vocabulary.sha256,
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["vocab.txt"]


def test_fingerprint_depends_on_order_and_not_on_counts() -> None:
    first = Vocabulary(["a", EOS, UNK], [3, 2, 1])
    assert first.sha256 == Vocabulary(["a", EOS, UNK], [9, 9, 9]).sha256
    assert first.sha256 != Vocabulary([EOS, "a", UNK], [3, 2, 1]).sha256


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"the\t5\n",
        b"# torchdefine vocabulary 2\t2\n<unk>\t1\n<eos>\t1\n",
        b"# torchdefine vocabulary 1\t3\n<unk>\t1\n<eos>\t1\n",
        b"# torchdefine vocabulary 1\n<unk>\t1\n<eos>\t1\n",
        b"# torchdefine vocabulary 1\t2\n<unk>\t1\n<eos>\tmany\n",
        b"# torchdefine vocabulary 1\t3\n<unk>\t1\n<eos>\t1\n<eos>\t1\n",
        b"# torchdefine vocabulary 1\t3\n<unk>\t1\n<eos>\t1\na b\t1\n",
        b"# torchdefine vocabulary 1\t1\n<eos>\t1\n",
        b"# torchdefine vocabulary 1\t3\n<unk>\t1\n<eos>\t1\n\xff\t1\n",
    ],
    ids=["empty", "no header", "version", "cut", "no size", "count", "twice", "space", "no unk", "not utf-8"],
)
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"vocab\.txt"):
        Vocabulary.load(path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("# torchdefine vocabulary 1\t2\n<unk>\t1\n<eos>\tmany\n")
    with pytest.raises(UserError, match="line 3 "):
        Vocabulary.load(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vocabulary file .*vocab\.txt does not exist"):
        Vocabulary.load(tmp_path / "vocab.txt")


def test_counts_must_match_tokens() -> None:
    with pytest.raises(UserError, match="2 for 3"):
        Vocabulary(["a", EOS, UNK], [1, 1])


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Vocabulary.from_counts(COUNTS).save(tmp_path)
    before = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(MachineError, match=r"disk is full.*vocab\.txt"):
        Vocabulary.from_counts({"other": 1}).save(tmp_path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["vocab.txt"]
