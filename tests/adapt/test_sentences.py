"""Sentence vectors against a sentence-by-sentence loop, and rank correlation against scipy."""

import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from tests.adapt.tiny_models import WIDTH, V, bert, gpt2, t5
from torchdefine.adapt.measures import measured
from torchdefine.adapt.sentences import (
    rank_correlation,
    sentence_batches,
    sentence_parts,
    sentence_vectors,
    token_counts,
)
from torchdefine.errors import UserError


class Letters:
    """A tokenizer of one token a letter, with the interface that transformers' have."""

    pad_token, eos_token = None, "."

    def __call__(self, sentences: list[str], **options: Any) -> transformers.BatchEncoding:
        rows = [[3 + ord(letter) % (V - 3) for letter in text][: options["max_length"]] for text in sentences]
        longest = max(map(len, rows))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return transformers.BatchEncoding({"input_ids": padded, "attention_mask": mask})


@pytest.mark.parametrize("make", [bert, gpt2, t5])
def test_vectors_are_means_over_the_tokens_that_are_there(make: Any) -> None:
    model = make(True).eval()
    sentences = ["a", "bc de", "a longer sentence", "another one, the longest"]
    vectors = sentence_vectors(model, Letters(), sentences)
    body = model.encoder if model.config.is_encoder_decoder else model.base_model
    for sentence, vector in zip(sentences, vectors, strict=True):
        ids = Letters()([sentence], max_length=99)["input_ids"]
        with torch.no_grad():
            alone = body(input_ids=ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, alone, atol=1e-5, rtol=1e-4)


def roberta(positions: int) -> Any:
    """Its positions are counted from the padding's, 1, on."""
    config = transformers.RobertaConfig(
        vocab_size=V,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=positions + 2,
    )
    return transformers.RobertaModel(config)


@pytest.mark.parametrize("make", [lambda: bert(True), lambda: gpt2(True), lambda: roberta(64)])
def test_sentences_end_where_a_model_has_no_more_positions(make: Any) -> None:
    model = make().eval()
    longest, longer = "the words " * 7, "the words " * 30
    (batch,) = sentence_batches(model, Letters(), [longer])
    assert batch["input_ids"].shape == (1, 64)
    assert sentence_vectors(model, Letters(), [longest, longer]).shape == (2, WIDTH)


def test_tokenizers_that_do_not_fit_are_refused() -> None:
    model = bert(True).eval()
    ending = Letters()
    ending.eos_token = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="neither a padding token nor one that ends a text"):
        sentence_vectors(model, ending, ["some words"])
    model.resize_token_embeddings(20)
    with pytest.raises(UserError, match=r"has the token \d+, but the model's table has 20 rows"):
        sentence_vectors(model, Letters(), ["some words"])


def test_rank_correlation_is_spearmans() -> None:
    stats = pytest.importorskip("scipy.stats")
    one = torch.randn(20, 8)
    other = one + 0.5 * torch.randn(20, 8)

    def pairs(vectors: torch.Tensor) -> list[float]:
        unit = vectors / vectors.norm(dim=1, keepdim=True)
        return [float(unit[i] @ unit[j]) for i in range(20) for j in range(i + 1, 20)]

    wanted = stats.spearmanr(pairs(one), pairs(other)).statistic
    assert rank_correlation(one, other) == pytest.approx(wanted, abs=1e-3)
    assert rank_correlation(one, one.clone()) == pytest.approx(1.0)


def test_an_interval_of_a_mean_is_the_usual_one() -> None:
    """Of 400 normal numbers: two standard errors on each side, about; and a change common to all has none."""
    numbers = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    found = measured(lambda some: float(numbers[some].mean()), 400)
    assert found.value == pytest.approx(float(numbers.mean()))
    assert found.high - found.low == pytest.approx(4 * float(numbers.std()) / 20, rel=0.35)
    shifted = measured(
        lambda some: float(numbers[some].mean()) + 1, 400, before=lambda some: float(numbers[some].mean())
    )
    assert shifted.high - shifted.low == pytest.approx(0, abs=1e-6)
    assert shifted.before == found.value


def test_parts_have_no_sentence_in_common(tmp_path: Path) -> None:
    path = tmp_path / "text.txt.xz"
    lines = [f"sentence number {n} of many" for n in range(600)]
    with lzma.open(path, "wt") as file:
        file.write(
            ". ".join(lines) + ".\n" + "\n".join([*(f"{line}." for line in lines), "", "too short", " = Heading = "])
        )
    parts = sentence_parts(path, choosing=50, held_out=100)
    assert (len(parts.choosing), len(parts.held_out), len(parts.fitting)) == (50, 100, 450)
    assert {*parts.fitting, *parts.choosing, *parts.held_out} == {f"{line}." for line in lines}
    assert sentence_parts(path, choosing=50, held_out=100) == parts
    assert len(sentence_parts(path, limit=90).held_out) == 30


def test_short_and_missing_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("one line of text\n")
    with pytest.raises(UserError, match="has 1 different sentences"):
        sentence_parts(path)
    with pytest.raises(UserError, match="There is no text file"):
        sentence_parts(tmp_path / "missing.txt")


def test_tokens_are_counted() -> None:
    def tokenizer(sentences: list[str], truncation: bool, verbose: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word) for word in sentence.split()] for sentence in sentences]}

    tokenizer.all_special_ids = [3, 4, 9]  # type: ignore[attr-defined]
    counts = token_counts(tokenizer, ["1 2 2", "4 1"] * 700, 6)
    assert torch.equal(counts, torch.tensor([0, 1400, 1400, 1, 700, 0]))
