import pytest
import torch
from benchmarks.measuring import Setting
from benchmarks.unit import RECIPES, Passes, groups, unit_and_ids, ways

from torchdefine.training.precision import Precision

SETTING = Setting(torch.device("cpu"), small=True, repeats=2)
SAME = ("ours, distinct tokens", "a loop over groups")


@pytest.mark.parametrize("recipe", RECIPES.values())
def test_what_computes_the_unit_gives_its_vectors_and_gradients(recipe: str) -> None:
    unit, ids, x = unit_and_ids(recipe, SETTING)
    ids, x = ids[:60], x[:60]
    every = ways(unit, ids)
    reference = Passes(unit, x, Precision("fp32", ids.device)).both()
    gradients = [parameter.grad.clone() for parameter in unit.parameters()]
    for name in SAME:
        found = Passes(every[name].module, x, Precision("fp32", ids.device)).both()
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)
        for parameter, gradient in zip(unit.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)


def test_backward_alone_gives_the_same_gradients_again_and_again() -> None:
    unit, ids, x = unit_and_ids(RECIPES["R3"], SETTING)
    passes = Passes(unit, x[:20], Precision("fp32", ids.device))
    passes.both()
    expected = [parameter.grad.clone() for parameter in unit.parameters()]
    again = passes.backward()
    for _ in range(2):
        again()
        for parameter, gradient in zip(unit.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_distinct_tokens_are_fewer() -> None:
    unit, ids, _ = unit_and_ids(RECIPES["R3"], SETTING)
    distinct = ways(unit, ids)["ours, distinct tokens"].module
    assert distinct.count == len(set(ids.tolist())) < len(ids)
    assert distinct.count <= distinct.room <= len(ids)


def test_there_is_a_group_for_every_recipe_and_pass() -> None:
    names = [group.name for group in groups(SETTING)]
    assert len(names) == 10
    assert names[2] == "R3, both"
    assert names[-1] == "R3, 64 tokens in inference"
