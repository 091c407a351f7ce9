"""What is said before training of the words that a text has and that a vocabulary leaves out."""

from pathlib import Path
from typing import Any

import pytest

from torchdefine.data import TextConfig, encode_corpus, train_subwords
from torchdefine.recipe import recipe_of
from torchdefine.tasks.language.task import describe_bands, describe_tokens


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.txt").write_text("a b c d e f g h\na b c d\na b\n")
    (folder / "valid.txt").write_text("a b x y\na b c d\n")
    return folder


def said(texts: Path, **settings: Any) -> list[str]:
    data = TextConfig(corpus=str(texts), **settings)
    counted, from_the_cache = (describe_tokens(encode_corpus(texts, data), data) for _ in range(2))
    assert counted == from_the_cache
    return counted


def test_all_words_are_kept(texts: Path) -> None:
    assert said(texts) == [
        "The vocabulary has 10 entries: all 8 different words of the text, <unk> and <eos>.",
        "20.0% of the validation text is <unk>: use subwords by data.tokenizer.",
    ]


def test_what_cuts_the_vocabulary_is_named_with_its_cure(texts: Path) -> None:
    assert said(texts, max_size=5) == [
        "The vocabulary is limited by data.max_size 5 to 5 entries: the 3 most frequent of the text's 8 different "
        "words, <unk> and <eos>.",
        "30.0% of the validation text is <unk>: use a larger data.max_size (none keeps every word), or subwords by "
        "data.tokenizer.",
    ]
    by_count = said(texts, min_count=2)
    assert by_count[0].startswith("The vocabulary is limited by data.min_count 2 to 6 entries: the 4 most frequent of")
    assert by_count[1].endswith("is <unk>: use a smaller data.min_count, or subwords by data.tokenizer.")


def test_a_limit_that_cuts_nothing_is_not_blamed(texts: Path) -> None:
    for max_size in (10, 11):
        assert said(texts, max_size=max_size) == said(texts)
    by_count = said(texts, min_count=2, max_size=9)
    assert by_count == said(texts, min_count=2)
    assert said(texts, min_count=2, max_size=5)[0].startswith(
        "The vocabulary is limited by data.max_size 5 and data.min_count 2 to 5 entries: "
    )


def test_few_unknown_words_need_no_cure_nor_do_those_of_the_text(texts: Path) -> None:
    (texts / "valid.txt").write_text("a b c d\n" * 9 + "x b c d\n")
    assert said(texts)[1] == "2.0% of the validation text is <unk>."
    (texts / "train.txt").write_text("a b c <unk>\n" * 9)
    (texts / "valid.txt").write_text("a <unk>\n" * 9)
    assert said(texts)[1] == "33.3% of the validation text is <unk>, which occurs in the training text itself."
    (texts / "valid.txt").unlink()
    assert len(said(texts)) == 1


def test_subwords_are_counted(texts: Path, tmp_path: Path) -> None:
    tokenizer = train_subwords([texts / "train.txt"], 270).save(tmp_path / "bpe.json")
    size = len(encode_corpus(texts, TextConfig(tokenizer=str(tokenizer))).tokenization)
    assert said(texts, tokenizer=str(tokenizer)) == [f"The tokenizer has {size} subwords."]


@pytest.mark.parametrize(
    ("embedding", "output", "said"),
    [
        (
            {"kind": "adaptive", "cutoffs": (4, 10, 20)},
            {"kind": "adaptive"},
            "These embedding.cutoffs are larger than the vocabulary and are ignored: 10, 20.",
        ),
        ({"kind": "adaptive", "cutoffs": (4, 9)}, {"kind": "adaptive"}, ""),
        (
            {"kind": "standard"},
            {"kind": "adaptive-table", "cutoffs": (4, 12)},
            "These output.cutoffs are larger than the vocabulary and are ignored: 12.",
        ),
        ({"kind": "standard"}, {"kind": "full"}, ""),
    ],
)
def test_bands_beyond_the_vocabulary_are_named(embedding: dict[str, Any], output: dict[str, Any], said: str) -> None:
    found = describe_bands(10, recipe_of({"embedding": embedding, "output": output}))
    assert [sentence.startswith(said) for sentence in found] == ([True] if said else [])


def test_a_tokenizer_that_drops_characters_is_called_so(texts: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE({letter: index for index, letter in enumerate("abcdefgh")}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "bpe.json"))
    assert said(texts, tokenizer=str(tmp_path / "bpe.json")) == [
        "The tokenizer has 12 subwords. It drops or changes 25.0% of the characters of the text, so bits per byte are "
        "too low: use a tokenizer that keeps them, such as a byte-level one."
    ]
