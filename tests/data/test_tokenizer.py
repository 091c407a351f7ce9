import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")

from torchdefine.data.tokenizer import SMALLEST_BPE, SubwordTokenizer, load_tokenization, train_subwords  # noqa: E402
from torchdefine.data.vocabulary import Tokenization, Vocabulary  # noqa: E402
from torchdefine.errors import UserError  # noqa: E402

TEXT = "the cat sat on the mat\n  the naïve cat, 猫\n\nthe end\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SubwordTokenizer:
    path = tmp_path_factory.mktemp("text") / "train.txt"
    path.write_text(TEXT * 20, encoding="utf-8")
    return train_subwords([path], 300)


def test_the_packages_own_object_is_at_hand(trained: SubwordTokenizer) -> None:
    assert isinstance(trained.tokenizer, tokenizers.Tokenizer)
    assert trained.tokenizer.get_vocab_size() == len(trained)
    assert trained.tokenizer.encode("the cat").ids == trained.encode("the cat")[:-1]  # without the end of the line


@pytest.fixture
def foreign_file(tmp_path: Path) -> Path:
    """A tokenizer that others made: its own unknown token, none of our specials, and truncation switched on."""
    model = tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    path = tmp_path / "foreign.json"
    tokenizer.save(str(path))
    return path


def test_trained_bpe_has_its_specials_first(trained: SubwordTokenizer) -> None:
    assert [trained.token(index) for index in range(4)] == ["<pad>", "<bos>", "<eos>", "<unk>"]
    assert (trained.pad_id, trained.bos_id, trained.eos_id, trained.unk_id) == (0, 1, 2, 3)
    assert SMALLEST_BPE < len(trained) <= 300


def test_text_to_ids_and_back(trained: SubwordTokenizer) -> None:
    ids = trained.encode(TEXT)
    assert trained.decode(ids) == TEXT, "white space and all"
    assert ids.count(trained.eos_id) == 4
    assert trained.encode("") == []
    assert trained.decode(trained.encode("unseen ümlaut 🙂")) == "unseen ümlaut 🙂\n"


def test_encode_lines_is_encode_for_many_lines(trained: SubwordTokenizer) -> None:
    lines = TEXT.split("\n")[:-1] * 600  # more than are encoded at once
    ids = trained.encode_lines(lines)
    assert ids.dtype == np.uint32
    assert ids.tolist() == trained.encode(TEXT) * 600
    assert len(trained.encode_lines([])) == 0


def test_threads_that_encode_lines_and_sentences_do_not_disturb_each_other(trained: SubwordTokenizer) -> None:
    lines, sentences = ["the <eos> cat"] * 50, ["the <eos> mat"] * 50
    wanted = trained.encode_lines(lines).tolist(), trained.encode_sentences(sentences)
    assert wanted[0].count(trained.eos_id) == 100
    assert not any(trained.eos_id in ids for ids in wanted[1])

    def both(_: int) -> bool:
        return (trained.encode_lines(lines).tolist(), trained.encode_sentences(sentences)) == wanted

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both, range(200)))


def test_words_and_subwords_are_saved_and_loaded_alike(tmp_path: Path, trained: SubwordTokenizer) -> None:
    tokenizations: list[Tokenization] = [trained, Vocabulary.from_counts({"the": 3, "<eos>": 2})]
    for tokenization, name in zip(tokenizations, ("tokenizer.json", "vocab.txt"), strict=True):
        folder = tmp_path / tokenization.kind
        folder.mkdir()
        assert tokenization.save(folder) == folder / name
        loaded = load_tokenization(folder)
        assert type(loaded) is type(tokenization)
        assert (loaded.sha256, len(loaded)) == (tokenization.sha256, len(tokenization))
        assert loaded.encode("the the") == tokenization.encode("the the")


def test_missing_specials_are_added_and_saved(tmp_path: Path, foreign_file: Path) -> None:
    tokenizer = SubwordTokenizer.load(foreign_file)
    assert len(tokenizer) == 7
    assert sorted((tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.id("<unk>"))) == [
        3,
        4,
        5,
        6,
    ]
    assert tokenizer.unk_id == 0, "its own unknown token is the one that it gives"
    assert tokenizer.encode("the cat the dog") == [1, 2, 1, 0, tokenizer.eos_id], "nothing is truncated"
    saved = tokenizer.save(tmp_path)
    assert tokenizers.Tokenizer.from_file(str(saved)).token_to_id("<eos>") == tokenizer.eos_id
    again = SubwordTokenizer.load(saved)
    assert (again.sha256, again.eos_id, len(again)) == (tokenizer.sha256, tokenizer.eos_id, 7)


def test_a_sentence_holds_no_special_token_even_where_it_is_a_word() -> None:
    words = {"<unk>": 0, "<eos>": 1, "<bos>": 2, "<pad>": 3, "the": 4, "end": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = SubwordTokenizer(made.to_str())
    assert tokenizer.encode_sentences(["the <eos> <bos> <pad> end", "the end"]) == [[4, 0, 0, 0, 5], [4, 5]]


def test_ids_outside_are_refused(trained: SubwordTokenizer) -> None:
    assert trained.id("not a subword") == trained.unk_id
    for outside in (-1, len(trained)):
        with pytest.raises(IndexError, match=str(outside)):
            trained.token(outside)


def test_progress_ends_with_the_total(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(TEXT, encoding="utf-8")
    calls: list[tuple[int, int]] = []
    train_subwords([path], 300, progress=lambda done, total: calls.append((done, total)))
    size = path.stat().st_size
    assert calls[-1] == (size, size)


def test_training_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocabulary_size is 259, but must be at least 260"):
        train_subwords([tmp_path / "train.txt"], 259)
    with pytest.raises(UserError, match=r"text file .*train\.txt does not exist"):
        train_subwords([tmp_path / "train.txt"], 300)
    with pytest.raises(UserError, match="at least one text file"):
        train_subwords([], 300)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff"])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        SubwordTokenizer.load(path)


def test_missing_files_are_refused(tmp_path: Path, trained: SubwordTokenizer) -> None:
    with pytest.raises(UserError, match=r"tokenizer file .*absent\.json does not exist"):
        SubwordTokenizer.load(tmp_path / "absent.json")
    with pytest.raises(UserError, match=r"neither vocab\.txt nor tokenizer\.json"):
        load_tokenization(tmp_path)
    trained.save(tmp_path)
    Vocabulary.from_counts({"a": 1}).save(tmp_path)
    with pytest.raises(UserError, match=r"both vocab\.txt and tokenizer\.json"):
        load_tokenization(tmp_path)


def test_absent_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, foreign_file: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'torchdefine\[bpe\]'"):
        SubwordTokenizer.load(foreign_file)


def loaded(tokenizer: Any) -> SubwordTokenizer:
    return SubwordTokenizer(tokenizer.to_str())


def test_the_unknown_piece_of_a_unigram_model_is_its_unknown_token() -> None:
    """Its file has the number of that piece, and no name."""
    pieces = [("a", -1.0), ("<nothing>", -9.0), ("b", -1.0)]
    tokenizer = loaded(tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=1)))
    assert tokenizer.unk_id == 1
    assert tokenizer.encode("axb") == [0, 1, 2, tokenizer.eos_id]
    assert tokenizer.lost_characters(["axb"]) == (0, 3), "an unknown piece is counted as such"


def test_characters_that_vanish_or_change_are_lost() -> None:
    dropping = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "c": 2}, []))
    dropping.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert loaded(dropping).lost_characters(["abx cab", "  yya"]) == (3, 9)
    lowering = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "c": 2}, []))
    lowering.normalizer = tokenizers.normalizers.Lowercase()
    assert loaded(lowering).lost_characters(["AbA", "c", ""]) == (2, 4)


def test_what_is_only_spelled_otherwise_is_not_lost(trained: SubwordTokenizer) -> None:
    lines = [*TEXT.split("\n"), "unseen ümlaut 🙂"]
    assert trained.lost_characters(lines)[0] == 0
    letters = {letter: index for index, letter in enumerate("▁abĠÄ")}
    for normalizer, pre_tokenizer in (
        (tokenizers.normalizers.Replace(" ", "▁"), None),
        (tokenizers.normalizers.Prepend("▁"), tokenizers.pre_tokenizers.Whitespace()),
        (tokenizers.normalizers.ByteLevel(), None),
        (None, tokenizers.pre_tokenizers.Metaspace()),
    ):
        spelling = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
        if normalizer is not None:
            spelling.normalizer = normalizer
        if pre_tokenizer is not None:
            spelling.pre_tokenizer = pre_tokenizer
        assert loaded(spelling).lost_characters(["ab ba", "a"]) == (0, 5)


def test_of_many_long_lines_a_sample_is_looked_at(trained: SubwordTokenizer) -> None:
    assert trained.lost_characters(["a"] * 5000)[1] == 834
    assert trained.lost_characters(["a" * 20_000]) == (0, 10_000)
