import gzip
import hashlib
import lzma
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from torchdefine.data import BitextConfig, encode_bitext, resolve_corpus
from torchdefine.data.bitext import Bitext, _kept, one_line
from torchdefine.data.sources import find_bitext
from torchdefine.data.text_files import read_pairs
from torchdefine.data.tokenizer import TokenizerPair
from torchdefine.errors import UserError

ENGLISH = ["the cat sleeps", "a  dog barks\t loudly", "<eos> is text <pad>", "", "naïve 猫 😀", "x " * 60]
GERMAN = ["die Katze schläft", "ein Hund bellt", "<eos> ist Text", "leer", "naiv 猫", "y"]


def write(
    folder: Path, split: str = "train", english: list[str] | None = None, german: list[str] | None = None
) -> None:
    (folder / f"{split}.en").write_text("".join(f"{line}\n" for line in english or ENGLISH), encoding="utf-8")
    (folder / f"{split}.de").write_text("".join(f"{line}\n" for line in german or GERMAN), encoding="utf-8")


def rules(**changes) -> BitextConfig:
    return BitextConfig(**{"bpe_size": 300, "max_length": 40} | changes)


def sentences(bitext: Bitext, split: str) -> list[tuple[str, str]]:
    pairs, tokenizers = bitext.splits[split], bitext.tokenization
    found = []
    for index in range(len(pairs)):
        sides = []
        for file, ends, tokenizer in (
            (pairs.source, pairs.source_ends, tokenizers.source),
            (pairs.target, pairs.target_ends, tokenizers.target),
        ):
            start = 0 if index == 0 else ends[index - 1]
            ids = file.tokens[start : ends[index]].tolist()
            assert ids[-1] == tokenizer.eos_id
            sides.append(tokenizer.decode_sentence(ids))
        found.append((sides[0], sides[1]))
    return found


@pytest.mark.parametrize("joint", [True, False])
def test_pairs_come_back_as_they_were(tmp_path: Path, joint: bool) -> None:
    write(tmp_path)
    write(tmp_path, "valid")
    bitext = encode_bitext(tmp_path, rules(joint=joint), tmp_path / "cache")
    wanted = [(one_line(a), one_line(b)) for a, b in zip(ENGLISH, GERMAN, strict=True)]
    assert sentences(bitext, "valid") == wanted  # kept whole
    assert sentences(bitext, "train") == [*wanted[:3], wanted[4]]  # one empty, one too unequal
    assert bitext.left_out == 2
    raw = "".join(f"{source}\n" for source, _ in sentences(bitext, "train")).encode()
    header = bitext.splits["train"].source.header
    assert (header.bytes, header.text_sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert bitext.tokenization.joint == joint
    again = encode_bitext(tmp_path, rules(joint=joint), tmp_path / "cache")
    assert again.folder == bitext.folder
    assert again.splits["train"].tokens_sha256 == bitext.splits["train"].tokens_sha256
    assert TokenizerPair.load(bitext.folder).sha256 == bitext.tokenization.sha256


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "de", "target": "en"},
        {"bpe_size": 310},
        {"joint": False},
        {"max_length": 10},
        {"max_ratio": 1.0},
    ],
)
def test_other_rules_are_encoded_anew(tmp_path: Path, changes: dict) -> None:
    write(tmp_path)
    first, other = (encode_bitext(tmp_path, one, tmp_path / "cache") for one in (rules(), rules(**changes)))
    assert other.folder != first.folder


def test_a_table_and_packed_parts_give_the_same_pairs(tmp_path: Path) -> None:
    plain, table, packed = (tmp_path / name for name in ("plain", "table", "packed"))
    for folder in (plain, table, packed):
        folder.mkdir()
    write(plain, german=[g.replace("\t", " ") for g in GERMAN], english=[one_line(e) for e in ENGLISH])
    rows = [f"{one_line(a)}\t{b}\tan author\n" for a, b in zip(ENGLISH, GERMAN, strict=True)]
    (table / "train.tsv").write_text("".join(rows), encoding="utf-8")
    for number, part in ((1, slice(0, 2)), (2, slice(2, None))):
        with gzip.open(packed / f"train-{number}.en.gz", "wt", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in ENGLISH[part]))
        with lzma.open(packed / f"train-{number}.de.xz", "wt", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in GERMAN[part]))
    found = [encode_bitext(f, rules(), tmp_path / "cache") for f in (plain, table, table / "train.tsv", packed)]
    assert len({bitext.splits["train"].tokens_sha256 for bitext in found}) == 1


def test_languages_may_be_named_with_capitals(tmp_path: Path) -> None:
    for name in ("train.en", "train.zh_CN", "test.en", "test.ZH_CN.gz"):
        (tmp_path / name).touch()
    for target in ("zh_CN", "zh_cn"):
        found = find_bitext(tmp_path, "EN", target)
        assert [path.name for files in found.values() for path in files.all] == [
            "train.en",
            "train.zh_CN",
            "test.en",
            "test.ZH_CN.gz",
        ]


def test_what_is_kept_follows_the_rule() -> None:
    lengths = np.array([[1, 0, 5, 41, 2, 2, 40], [1, 3, 5, 41, 11, 12, 40]])
    kept = _kept(lengths, rules(max_ratio=3.0))
    assert kept.tolist() == [True, False, True, False, True, False, True]


def test_sides_of_unequal_length_are_refused(tmp_path: Path) -> None:
    write(tmp_path, english=["a"] * 7, german=["b"] * 5)
    with pytest.raises(UserError, match=r"train\.en has 7 lines and .*train\.de has 5, but line must stand for line"):
        encode_bitext(tmp_path, rules(), tmp_path / "cache")
    assert not list(tmp_path.glob("cache/bitexts/*/*"))


def test_sides_in_blocks_of_different_sizes_stay_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdefine.data.text_files.BLOCK_BYTES", 64)
    english = [f"s{i}" for i in range(500)]
    german = [f"t{i} " + "lang " * (i % 9) for i in range(500)]
    write(tmp_path, english=english, german=german)
    files = find_bitext(tmp_path, "en", "de")["train"]
    pairs = [pair for block in read_pairs(files) for pair in zip(*block, strict=True)]
    assert pairs == list(zip(english, german, strict=True))
    write(tmp_path, english=english, german=german[:-1])
    with pytest.raises(UserError, match=r"has 500 lines and .* has 499"):
        list(read_pairs(files))
    write(tmp_path, english=english[:3], german=german)
    with pytest.raises(UserError, match=r"has 3 lines and .* has 500"):
        list(read_pairs(files))


def test_bad_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    wrong = r"neither tables nor pairs of the same name that end in \.en and \.de"
    cases = {
        "empty": ({}, "has no training text for en and de"),
        "one side": ({"train.en": "a\n"}, wrong),
        "both kinds": ({"train.en": "a\n", "train.de": "b\n", "train.tsv": "a\tb\n"}, wrong),
        "other names": ({"train-a.en": "a\n", "train-b.de": "b\n"}, wrong),
        "two splits": (
            {"train.en": "a\n", "train.de": "b\n", "dev-test.en": "a\n", "dev-test.de": "b\n"},
            r"dev-test\... names several splits \(test, valid\): rename it",
        ),
        "no tab": ({"train.tsv": "a\tb\nab\n"}, r"Line 2 of .*train\.tsv has no second column"),
        "all left out": ({"train.en": "\n", "train.de": "x\n"}, "No pair of .* is kept"),
    }
    for name, (files, message) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            encode_bitext(folder, rules(), tmp_path / "cache")
        assert "\n" not in str(caught.value)
    (tmp_path / "one side" / "train.de").write_bytes(b"\xff\xfe broken\n")
    with pytest.raises(UserError, match="is not UTF-8 text: line 1"):
        encode_bitext(tmp_path / "one side", rules(), tmp_path / "cache")
    with pytest.raises(UserError, match="bpe_size is 100, but must be at least 260"):
        encode_bitext(tmp_path / "one side", rules(bpe_size=100), tmp_path / "cache")
    with pytest.raises(UserError, match="neither a folder nor a bitext called nowhere"):
        resolve_corpus("nowhere", parallel=True)


def test_the_shipped_sample_keeps_held_out_sentences_out_of_training() -> None:
    splits = find_bitext(resolve_corpus("tatoeba-en-de", parallel=True), "en", "de")
    sides: dict[str, tuple[set[str], set[str]]] = {}
    for split, files in splits.items():
        blocks = list(read_pairs(files))
        sides[split] = {s for b in blocks for s in b[0]}, {t for b in blocks for t in b[1]}
    assert [len(sides[split][0]) for split in ("valid", "test")] == [1000, 2000]
    for side in (0, 1):
        for one, other in (("train", "valid"), ("train", "test"), ("valid", "test")):
            assert not sides[one][side] & sides[other][side]
    assert (files.source[0].parent / "NOTICE.md").read_text(encoding="utf-8").count("CC BY 2.0") == 1
