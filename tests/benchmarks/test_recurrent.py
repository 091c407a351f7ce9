import torch
from benchmarks.measuring import Setting

from benchmarks import recurrent


def test_all_ways_of_the_recurrence_give_the_same() -> None:
    ways = recurrent.recurrence_ways(Setting(torch.device("cpu"), small=True, repeats=2))
    expected = ways[recurrent.AUTOGRAD]()
    for name in (recurrent.SCAN, recurrent.LOOP):
        for ours, theirs in zip(ways[name](), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
