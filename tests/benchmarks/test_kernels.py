from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.measuring import Setting

from benchmarks import kernels

SETTING = Setting(torch.device("cpu"), small=True, repeats=2)


@pytest.mark.parametrize(
    "ways",
    [
        lambda: kernels.residual_ways(SETTING, dropout=0.0),
        lambda: kernels.relu_ways(SETTING, dropout=0.0),
        lambda: kernels.softmax_ways(SETTING),
        lambda: kernels.lstm_ways(SETTING),
    ],
    ids=["residual", "relu", "softmax", "lstm"],
)
def test_contestants_do_the_same_work(ways: Callable[[], dict[str, Callable[[], Any]]]) -> None:
    both = ways()
    for ours, theirs in zip(both[kernels.OURS](), both[kernels.TORCHS](), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_kernels_are_said_to_need_a_gpu() -> None:
    for group in kernels.groups(SETTING):
        assert [bool(contestant.lacks) for contestant in group.contestants] == [False, True]
