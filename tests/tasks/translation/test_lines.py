from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

pytest.importorskip("tokenizers")
sacrebleu = pytest.importorskip("sacrebleu")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from torchdefine.data.tokenizer import SubwordTokenizer, train_subwords_on  # noqa: E402
from torchdefine.errors import UserError  # noqa: E402
from torchdefine.recipe import load_recipe  # noqa: E402
from torchdefine.run import RunFolder  # noqa: E402
from torchdefine.task import find_task  # noqa: E402
from torchdefine.tasks.sampling import SamplingOptions  # noqa: E402
from torchdefine.tasks.translation import (  # noqa: E402
    BeamConfig,
    TranslationOptions,
    TranslationRun,
    beam_search,
    score_translations,
)
from torchdefine.tasks.translation.lines import cut_sentence  # noqa: E402

TOKENIZER = train_subwords_on(
    [["one two three. four five six! seven eight nine, ten eleven twelve"] * 5], 320, sentences=True
)


@pytest.fixture(scope="module")
def untrained(translation_recipe: Path) -> TranslationRun:
    recipe = load_recipe(str(translation_recipe))
    pair = find_task("translation").open_data(recipe, None).tokenization
    folder = RunFolder("nowhere")
    return TranslationRun(folder, recipe, pair, find_task("translation").build(recipe, pair), folder.best)


@given(text=st.text(max_size=200), longest=st.integers(1, 30))
def test_pieces_are_the_sentence(text: str, longest: int) -> None:
    ids = TOKENIZER.encode_sentences([text])[0]
    pieces = cut_sentence(ids, longest, TOKENIZER)
    assert [index for piece in pieces for index in piece] == ids
    assert all(0 < len(piece) <= longest for piece in pieces)


def test_cuts_come_after_sentences_then_between_words() -> None:
    ids = TOKENIZER.encode_sentences(["one two three. four five six! seven eight"])[0]
    assert len(ids) == 10
    pieces = [TOKENIZER.decode_sentence(piece) for piece in cut_sentence(ids, 9, TOKENIZER)]
    assert pieces == ["one two three. four five six!", "seven eight"]
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    pieces = [TOKENIZER.decode_sentence(p) for p in cut_sentence(ids[:3] * 4, 5, TOKENIZER)]
    assert all(word in words for piece in pieces for word in piece.split())


@pytest.mark.parametrize(
    ("tokens", "first"),
    [
        (["▁one", "▁tw", "o", "▁th", "re", "e"], 3),  # before the last word that begins
        (["▁on", "e.", "▁two", "▁three", "▁four", "▁five"], 2),  # after a sentence, if a third is in it
        (["▁one.", "▁two", "▁three", "▁four", "▁five", "▁six"], 5),  # less would make many short pieces
        (["▁o", "n", "e", "t", "w", "o"], 5),  # nowhere in particular
    ],
)
def test_a_piece_is_as_long_as_a_good_place_to_cut_lets_it_be(tokens: list[str], first: int) -> None:
    tokenizer = cast("SubwordTokenizer", SimpleNamespace(token=tokens.__getitem__))
    pieces = cut_sentence(list(range(6)), 5, tokenizer)
    assert pieces == [list(range(first)), list(range(first, 6))]


def test_as_many_lines_come_out_as_go_in(untrained: TranslationRun) -> None:
    lines = ["", "one", "two " * 90, " \t ", "مرحبا 猫", "one\rtwo\x0bthree", "x" * 300]
    long_lines: list[int] = []
    seen: list[tuple[int, int]] = []
    untrained.model.train()
    found = untrained.translate(
        lines,
        TranslationOptions(BeamConfig(batch_size=4), n_best=2),
        progress=lambda done, total: seen.append((done, total)),
        on_long_line=lambda number, tokens, pieces: long_lines.append(number),
    )
    assert untrained.model.training
    assert len(found) == len(lines)
    assert [len(best) for best in found] == [1, 2, 2, 1, 2, 2, 2]
    assert long_lines == [3, 7]
    assert seen[-1][0] == seen[-1][1]
    assert all(len(t.text.splitlines()) <= 1 for best in found for t in best)
    assert untrained.translate([]) == []


def test_no_translation_may_hold_padding_beginnings_or_unknown_words(
    untrained: TranslationRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchdefine.tasks.translation.lines.beam_search", search := Mock(wraps=beam_search))
    untrained.translate(["one"])
    tokens, target = search.call_args.args[2], untrained.tokenization.target
    assert set(tokens.forbidden) == {target.pad_id, target.bos_id, target.unk_id}


def test_draws_differ_from_line_to_line_and_from_seed_to_seed(untrained: TranslationRun) -> None:
    def drawn(seed: int) -> list[str]:
        options = TranslationOptions(sampling=SamplingOptions(), seed=seed)
        return [best[0].text for best in untrained.translate(["one two", "one two"], options)]

    once, again, other = drawn(1), drawn(1), drawn(2)
    assert once == again
    assert len({*once, *other}) == 4


def test_scores_are_sacrebleus_with_their_signatures() -> None:
    texts, references = ["the cat sat on the mat", "a dog barks"], ["the cat sat on a mat", "a dog barked loudly"]
    scores = score_translations(texts, references)
    assert scores.bleu == sacrebleu.corpus_bleu(texts, [references]).score
    assert scores.chrf == sacrebleu.corpus_chrf(texts, [references]).score
    assert f"version:{sacrebleu.__version__}" in scores.bleu_signature
    assert "nc:6|nw:0" in scores.chrf_signature
    with pytest.raises(UserError, match="2 translations need as many references, not 1"):
        score_translations(texts, references[:1])
    with pytest.raises(UserError, match="no translations to score"):
        score_translations([], [])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(UserError, match=r"pip install 'torchdefine\[mt\]'"):
        score_translations(["a"], ["b"])


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="A beam of 4 cannot give the 5 best translations: use a beam of 5 or more"):
        TranslationOptions(n_best=5)
    with pytest.raises(UserError, match="n_best is 0"):
        TranslationOptions(n_best=0)
    with pytest.raises(UserError, match="The seed is -1, but must not be negative"):
        TranslationOptions(seed=-1)
