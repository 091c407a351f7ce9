"""BERT of transformers is as large as ours, and reads the same rows."""

import pytest
import torch
from benchmarks.masked import BERT, contestants, place_of, recipe_of
from benchmarks.measuring import Setting
from benchmarks.steps import build_model

SETTING = Setting(torch.device("cpu"), small=True, repeats=2)


def test_every_contestant_takes_a_step_and_has_the_same_body() -> None:
    pytest.importorskip("transformers")
    parameters = {}
    for contestant in contestants(SETTING):
        if not contestant.lacks:
            prepared = contestant.prepare()
            prepared.work()
            parameters[contestant.name] = prepared.facts()["parameters"]
    assert parameters[BERT] - parameters["ours, kernel by kernel"] == 128  # the one type of tokens
    small = [recipe_of(table, small=True) for table in ("standard", "define")]
    bodies = {build_model(recipe, place_of(recipe, SETTING)).parameters_by_part()["context"] for recipe in small}
    assert len(bodies) == 1
