import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchdefine.data.batches import IGNORE, TokenStreams, shard
from torchdefine.errors import UserError

START = 7
sizes = st.integers(1, 200)
batch_sizes = st.integers(1, 16)
lengths = st.integers(1, 40)


def distinct_tokens(count: int) -> np.ndarray:
    return np.arange(1000, 1000 + count, dtype=np.uint16)


def read_through(streams: TokenStreams, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    segments = [streams.segment(number * length, length) for number in range(math.ceil(streams.length / length))]
    inputs, targets = zip(*segments, strict=True)
    for number, of_device in enumerate(targets):
        assert np.array_equal(streams.host_targets(number * length, length), of_device.numpy())
    return torch.cat(inputs, dim=1), torch.cat(targets, dim=1)


def test_rows_by_hand() -> None:
    streams = TokenStreams(np.array([10, 11, 12, 13, 14, 15, 16], dtype=np.uint16), 3, "cpu", START)
    inputs, targets = streams.segment(0, 5)
    assert inputs.tolist() == [[START, 10], [11, 12], [13, 14]]
    assert targets.tolist() == [[10, 11], [12, 13], [14, 15]]
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert (streams.length, streams.batch_size) == (2, 3)


def test_evaluation_rows_by_hand() -> None:
    streams = TokenStreams(np.array([10, 11, 12, 13], dtype=np.uint16), 3, "cpu", START, pad=True)
    inputs, targets = streams.segment(0, 5)
    assert inputs.tolist() == [[START, 10], [11, 12], [START, START]]
    assert targets.tolist() == [[10, 11], [12, 13], [IGNORE, IGNORE]]


@given(sizes, batch_sizes, lengths)
def test_each_kept_token_is_a_target_once(count: int, batch_size: int, length: int) -> None:
    if count < batch_size:
        return
    tokens = distinct_tokens(count)
    inputs, targets = read_through(TokenStreams(tokens, batch_size, "cpu", START), length)
    kept = count // batch_size * batch_size
    assert targets.flatten().tolist() == tokens[:kept].tolist()
    assert inputs.flatten().tolist() == [START, *tokens[: kept - 1].tolist()]


@given(sizes, batch_sizes, lengths)
def test_evaluation_leaves_no_token_out(count: int, batch_size: int, length: int) -> None:
    tokens = distinct_tokens(count)
    inputs, targets = read_through(TokenStreams(tokens, batch_size, "cpu", START, pad=True), length)
    real = targets != IGNORE
    assert targets[real].tolist() == tokens.tolist()
    assert inputs[real].tolist() == [START, *tokens[:-1].tolist()]
    assert (inputs >= 0).all(), "padding is an id that a model can look up"
    row_ends = real.sum(dim=1).tolist()
    assert all(not row[end:].any() for row, end in zip(real, row_ends, strict=True)), "padding ends a row"


@pytest.mark.parametrize("pad", [False, True])
@given(count=st.integers(16, 200), share=st.integers(1, 4), world_size=st.integers(1, 4), length=lengths)
def test_shards_together_are_the_whole(pad: bool, count: int, share: int, world_size: int, length: int) -> None:
    tokens, batch_size = distinct_tokens(count), share * world_size
    whole = TokenStreams(tokens, batch_size, "cpu", START, pad=pad)
    parts = [
        TokenStreams(tokens, batch_size, "cpu", START, shard(batch_size, rank, world_size), pad=pad)
        for rank in range(world_size)
    ]
    assert [part.batch_size for part in parts] == [share] * world_size
    for kind in (0, 1):
        together = torch.cat([read_through(part, length)[kind] for part in parts])
        assert torch.equal(together, read_through(whole, length)[kind])


def test_last_segment_may_be_shorter() -> None:
    streams = TokenStreams(distinct_tokens(10), 1, "cpu", START)
    assert streams.segment(8, 4)[0].shape == (1, 2)
    for outside in (-1, 10):
        with pytest.raises(IndexError, match=str(outside)):
            streams.segment(outside, 4)


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(UserError, match="3 tokens, too few for a batch of 4"):
        TokenStreams(distinct_tokens(3), 4, "cpu", START)
    with pytest.raises(UserError, match="0 tokens, too few"):
        TokenStreams(distinct_tokens(0), 4, "cpu", START, pad=True)
    with pytest.raises(UserError, match="batch size is 0"):
        TokenStreams(distinct_tokens(3), 0, "cpu", START)


def test_impossible_shards_are_refused() -> None:
    with pytest.raises(UserError, match="10 is not divisible by the 4 processes: use 8 or 12"):
        shard(10, 0, 4)
    with pytest.raises(UserError, match="2 is not divisible by the 4 processes: use 4"):
        shard(2, 0, 4)


def test_source_is_not_shared() -> None:
    tokens = distinct_tokens(4)
    streams = TokenStreams(tokens, 1, "cpu", START)
    tokens[:] = 0
    assert streams.segment(0, 4)[1].tolist() == [[1000, 1001, 1002, 1003]]


@pytest.mark.gpu
def test_segments_come_from_the_device_without_waiting() -> None:
    streams = TokenStreams(distinct_tokens(10), 4, "cuda", START, pad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs, _ = streams.segment(1, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert inputs.device.type == "cuda"
