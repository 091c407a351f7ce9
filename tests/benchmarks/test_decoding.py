import pytest
import torch
from benchmarks.measuring import Setting

from benchmarks import decoding

SETTING = Setting(torch.device("cpu"), small=True, repeats=2)
SHAPE = decoding.Shape(sentences=5, length=6, vocabulary=300, width=32, layers=1)


@pytest.mark.parametrize("recipe", ["europarl/transformer", "europarl/transformer-define"])
@pytest.mark.parametrize("cached", [False, True])
def test_our_search_finds_a_target_of_the_asked_length_for_every_sentence(recipe: str, cached: bool) -> None:
    assert decoding.ours(recipe, SHAPE, 2, SETTING, cached).work() == 5  # it looks at the lengths itself


def test_the_other_search_does_the_same_work() -> None:
    pytest.importorskip("transformers")
    assert decoding.theirs(SHAPE, 2, SETTING).work() == 5
