"""Rows of running text, and the tokens that are hidden in them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchdefine import UserError
from torchdefine.data import IGNORE
from torchdefine.tasks.masked import MaskedTokenizer, MaskingConfig, PackedRows
from torchdefine.tasks.masked.batches import MaskedBatches, Masking
from torchdefine.tasks.masked.recipe import MaskedTrainConfig
from torchdefine.training.distributed import Processes

WORDS = ["the", "cat", "sat", "while", "seven", "dogs", "were", "running", "through", "northern", "yard", "again"]


@pytest.fixture(scope="module")
def tokens() -> MaskedTokenizer:
    pytest.importorskip("tokenizers")
    from torchdefine.data.tokenizer import train_subwords_on

    return MaskedTokenizer(train_subwords_on([[" ".join(WORDS)] * 50], 290, sentences=True).tokenizer.to_str())


def text(tokens: MaskedTokenizer, lines: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return tokens.encode_lines([" ".join(random.choice(WORDS, 9)) for _ in range(lines)])


@given(st.integers(8, 40), st.integers(1, 30))
def test_every_token_stands_in_one_row(length: int, lines: int) -> None:
    ids = np.arange(5, 5 + 7 * lines)
    rows = PackedRows(ids, length, bos_id=1)
    whole, rest = rows.rows(np.arange(rows.whole)), rows.rest()
    assert whole.shape == (rows.whole, length)
    assert (whole[:, 0] == 1).all()
    assert (rest[:, 0] == 1).all()
    assert rest.shape[1] <= length
    assert np.array_equal(np.concatenate((whole[:, 1:].ravel(), rest[:, 1:].ravel())), ids)


@given(st.integers(0, 2**32), st.floats(0.05, 0.5), st.booleans())
def test_what_is_hidden(tokens: MaskedTokenizer, seed: int, fraction: float, whole_words: bool) -> None:
    rows = PackedRows(text(tokens, 40), 32, tokens.bos_id).rows(np.arange(6))
    masking = Masking(MaskingConfig(fraction=fraction, whole_words=whole_words), tokens)
    ids, places, targets = masking.hide(rows, np.random.default_rng(seed))
    assert places.shape == targets.shape == (6, max(1, round(fraction * 32)))
    counted = targets != IGNORE
    own = np.take_along_axis(rows, places, axis=1)
    assert (own[counted] == targets[counted]).all()
    assert not tokens.is_special[targets[counted]].any()
    assert all(len(set(row)) == len(row) for row in places.tolist())
    changed = np.zeros_like(rows, dtype=bool)
    np.put_along_axis(changed, places, counted, axis=1)
    assert (ids == rows)[~changed].all()
    assert not whole_words or not splits_words(tokens, rows, changed)
    again = masking.hide(rows, np.random.default_rng(seed))
    assert all(np.array_equal(one, other) for one, other in zip((ids, places, targets), again, strict=True))


def splits_words(tokens: MaskedTokenizer, rows: np.ndarray, hidden: np.ndarray) -> bool:
    """Whether a token that goes on with a word differs from the token before it in being hidden."""
    goes_on = ~tokens.begins_word[rows[:, 1:]] & ~tokens.is_special[rows[:, :-1]]
    return bool((goes_on & (hidden[:, 1:] != hidden[:, :-1])).any())


def test_single_tokens_do_split_words(tokens: MaskedTokenizer) -> None:
    rows = PackedRows(text(tokens, 40), 32, tokens.bos_id).rows(np.arange(6))
    _, places, targets = Masking(MaskingConfig(), tokens).hide(rows, np.random.default_rng(0))
    hidden = np.zeros_like(rows, dtype=bool)
    np.put_along_axis(hidden, places, targets != IGNORE, axis=1)
    assert splits_words(tokens, rows, hidden)


def test_hidden_tokens_are_masked_random_or_kept(tokens: MaskedTokenizer) -> None:
    rows = PackedRows(text(tokens, 3000), 64, tokens.bos_id).rows(np.arange(400))
    config = MaskingConfig(masked=0.6, random=0.3)
    ids, places, targets = Masking(config, tokens).hide(rows, np.random.default_rng(1))
    seen, counted = np.take_along_axis(ids, places, axis=1), targets != IGNORE
    masked = (seen == tokens.mask_id)[counted].mean()
    kept = (seen == targets)[counted].mean()
    assert masked == pytest.approx(0.6, abs=0.02)
    assert kept == pytest.approx(0.1 + 0.3 / (len(tokens) - tokens.is_special.sum()), abs=0.02)


def test_too_many_fates_are_refused() -> None:
    with pytest.raises(UserError, match=r"masked 0.8 and masking.random 0.3 are more than 1"):
        MaskingConfig(random=0.3)


def test_batches_follow_from_their_number_and_processes_share_them(tokens: MaskedTokenizer) -> None:
    rows = PackedRows(text(tokens, 60), 16, tokens.bos_id)
    config, masking = (
        MaskedTrainConfig(batch_size=8, length=16, accumulate=2, epochs=2),
        Masking(MaskingConfig(), tokens),
    )
    alone = MaskedBatches(rows, masking, config, torch.device("cpu"), Processes(0, 1))
    assert alone.total_steps == 2 * (rows.whole // 8)
    first, again = alone.batch(3), alone.batch(3)
    assert torch.equal(first.parts[1].inputs[0], again.parts[1].inputs[0])
    next_epoch = alone.batch(3 + rows.whole // 8)
    assert not torch.equal(first.parts[0].inputs[0], next_epoch.parts[0].inputs[0])
    halves = [MaskedBatches(rows, masking, config, torch.device("cpu"), Processes(rank, 2)).batch(3) for rank in (0, 1)]
    together = torch.cat([part.inputs[0] for half in halves for part in half.parts])
    assert torch.equal(together, torch.cat([part.inputs[0] for part in first.parts]))
    assert sum(half.tokens for half in halves) == first.tokens
    weights = [part.weight for half in halves for part in half.parts]
    counts = [(part.inputs[2] != IGNORE).sum().item() for half in halves for part in half.parts]
    assert weights == pytest.approx([2 * count / sum(counts) for count in counts])  # of the mean of two processes


def test_a_text_that_is_too_short_is_refused(tokens: MaskedTokenizer) -> None:
    rows = PackedRows(text(tokens, 4), 16, tokens.bos_id)
    with pytest.raises(UserError, match="too few for a batch of 64"):
        MaskedBatches(rows, Masking(MaskingConfig(), tokens), MaskedTrainConfig(), torch.device("cpu"), Processes(0, 1))
