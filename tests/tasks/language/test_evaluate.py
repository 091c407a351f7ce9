import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchdefine import train
from torchdefine.data import encode_corpus
from torchdefine.embedding import VocabularyFacts
from torchdefine.errors import UserError
from torchdefine.output import Losses
from torchdefine.recipe import load_recipe
from torchdefine.task import find_task
from torchdefine.tasks.language import LanguageModel, build_language_model
from torchdefine.tasks.language.evaluate import evaluate, short_stream_warning, unigram_perplexity


class Unigram(nn.Module):
    """Knows only how often each token occurs; counts how often it is asked for each."""

    carried = "state"

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        frequency = torch.tensor(counts, dtype=torch.float64)
        self.log_probs = nn.Parameter((frequency / frequency.sum()).log())
        self.asked = torch.zeros(len(counts), dtype=torch.long)
        self.segments: list[int] = []

    def initial_state(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size)

    def host_hint(self, targets: np.ndarray) -> None:
        return None

    def forward(self, ids: Tensor, targets: Tensor, state: Tensor, reduction: str, hint: None) -> tuple[Losses, Tensor]:
        self.segments.append(ids.shape[1])
        wanted = targets[targets != -100]
        self.asked += torch.bincount(wanted, minlength=len(self.asked))
        loss = -self.log_probs[wanted].sum()
        return Losses(loss, loss), state


@pytest.mark.parametrize(("batch_size", "length"), [(1, 140), (1, 7), (3, 16), (10, 1), (64, 33)])
def test_a_unigram_model_gets_its_closed_form_perplexity(corpus: Path, batch_size: int, length: int) -> None:
    encoded = encode_corpus(corpus)
    words, text = encoded.tokenization, encoded.splits["test"]
    model = Unigram(words.counts)
    result = evaluate(model, text, words.eos_id, batch_size=batch_size, length=length)  # type: ignore[arg-type]
    tokens = np.asarray(text.tokens)
    p = np.array(words.counts) / sum(words.counts)
    nats = -np.log(p[tokens]).sum()
    assert result.perplexity == pytest.approx(math.exp(nats / len(tokens)), rel=1e-9)
    assert result.perplexity == pytest.approx(unigram_perplexity(words.counts, tokens), rel=1e-9)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / (corpus / "test.txt").stat().st_size)
    assert model.asked.tolist() == np.bincount(tokens, minlength=len(words)).tolist()
    assert result.tokens == len(tokens)
    whole, rest = divmod(math.ceil(len(tokens) / batch_size), length)
    assert model.segments == [length] * whole + [rest] * bool(rest)


def test_a_word_outside_the_training_text_counts_as_half_a_sighting() -> None:
    expected = math.exp(-(math.log(3 / 4) + math.log(0.5 / 4)) / 2)
    assert unigram_perplexity([3, 1, 0], np.array([0, 2])) == pytest.approx(expected)
    with pytest.raises(UserError, match="The text is empty"):
        unigram_perplexity([3, 1, 0], np.array([], np.int64))


def test_streams_of_two_hundred_tokens_are_long_enough() -> None:
    assert [bool(short_stream_warning(tokens, 2)) for tokens in (399, 400)] == [True, False]


def tiny_model(recipe_file: Path, size: int) -> LanguageModel:
    return build_language_model(load_recipe(str(recipe_file)), VocabularyFacts(size))


def test_perplexity_does_not_depend_on_the_segment_length(corpus: Path, recipe_file: Path) -> None:
    encoded = encode_corpus(corpus)
    model = tiny_model(recipe_file, len(encoded.tokenization))
    text, start = encoded.splits["valid"], encoded.tokenization.eos_id
    results = [evaluate(model, text, start, length=length).perplexity for length in (1, 5, 64, 10_000)]
    assert results == pytest.approx([results[0]] * 4, rel=1e-5)
    assert model.training


def test_evaluation_equals_one_pass_over_the_whole_text(corpus: Path, recipe_file: Path) -> None:
    encoded = encode_corpus(corpus)
    model = tiny_model(recipe_file, len(encoded.tokenization)).eval()
    tokens = torch.from_numpy(np.asarray(encoded.splits["test"].tokens).astype(np.int64))
    inputs = torch.cat((torch.tensor([encoded.tokenization.eos_id]), tokens[:-1]))
    log_probs, _ = model.log_prob(inputs.unsqueeze(0), model.initial_state(1))
    expected = -log_probs[0].gather(-1, tokens.unsqueeze(-1)).mean()
    result = evaluate(model, encoded.splits["test"], encoded.tokenization.eos_id, length=13)
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-5)


def test_unknown_share_is_that_of_the_text(corpus: Path, tmp_path: Path, recipe_file: Path) -> None:
    encoded = encode_corpus(corpus)
    (tmp_path / "test.txt").write_text("w1 never-seen w2\nnever-seen\n")
    other = encode_corpus(tmp_path, vocabulary=encoded.tokenization)
    model = tiny_model(recipe_file, len(encoded.tokenization))
    result = evaluate(model, other.splits["test"], encoded.tokenization.eos_id)
    assert result.tokens == 6
    assert result.unknown_share == pytest.approx(2 / 6)
    many = evaluate(model, other.splits["test"], encoded.tokenization.eos_id, batch_size=10)
    assert many.protocol.startswith("6 streams from an empty state")  # there are no more tokens


@pytest.mark.parametrize(("settings", "streams"), [({}, 2), ({"valid_batch_size": 3}, 3)])
def test_validations_may_have_streams_of_their_own(
    corpus: Path, recipe_file: Path, settings: dict[str, int], streams: int
) -> None:
    encoded = encode_corpus(corpus)
    model = tiny_model(recipe_file, len(encoded.tokenization))
    validate = find_task("language").validation(load_recipe(str(recipe_file), {"eval": settings}), encoded, model)
    assert validate is not None
    protocol = validate().protocol
    assert protocol.startswith(f"{streams} streams from an empty state")
    assert "segments of 16 tokens" in protocol


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["lstm", "transformer-xl"])
def test_replayed_segments_cost_what_others_cost(
    corpus: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    encoded = encode_corpus(corpus)
    changes = {"context": {"kind": kind, "heads": 2, "head_dim": 8, "inner_dim": 32, "memory": 12, "layers": 2}}
    recipe = load_recipe(str(recipe_file), changes if kind == "transformer-xl" else {})
    model = build_language_model(recipe, VocabularyFacts(len(encoded.tokenization))).cuda()
    replays: list[int] = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), original(self))[1])
    found = []
    for fewest in (10**9, 2):
        monkeypatch.setattr(sys.modules["torchdefine.tasks.language.evaluate"], "FEWEST_RECORDED", fewest)
        for streams in (1, 3):
            found.append(evaluate(model, encoded.splits["test"], 0, batch_size=streams, length=8).loss)
        assert bool(replays) == (fewest == 2)
    assert found[2:] == pytest.approx(found[:2], rel=1e-5)


def test_a_result_has_what_a_new_evaluation_of_its_best_weights_finds(recipe_file: Path, tmp_path: Path) -> None:
    run = train(recipe_file, out=tmp_path / "run", train={"steps": 30, "eval_every": 10})
    for split in ("valid", "test"):
        found, said = run.evaluate(split).to_dict(), run.result["evaluation"][split]
        assert said.pop("loss") == pytest.approx(found.pop("loss"), rel=1e-6)
        assert said.pop("perplexity") == pytest.approx(found.pop("perplexity"), rel=1e-6)
        assert said.pop("bits_per_byte") == pytest.approx(found.pop("bits_per_byte"), rel=1e-6)
        assert said == found


def test_only_the_text_that_is_asked_for_is_read(recipe_file: Path, corpus: Path, tmp_path: Path) -> None:
    run = train(recipe_file, out=tmp_path / "run", train={"steps": 1})
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(corpus / "test.txt", other)
    (other / "train.txt").write_bytes(b"\xff not text")
    assert run.evaluate("test", data=other) == run.evaluate("test")
    with pytest.raises(UserError, match="has no valid text: it has train, test"):
        run.evaluate("valid", data=other)
    with pytest.raises(UserError, match="is not UTF-8 text"):
        run.evaluate("train", data=other)
