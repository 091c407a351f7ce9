"""Every stored result is read under today's names, and describes the model that it was measured on."""

from pathlib import Path

import pytest
from old_names import read_run

from torchdefine.recipe import recipe_of
from torchdefine.task import find_task

RESULTS = Path(__file__).parents[2] / "results"
OF_EXAMPLES = {"character-cnn", "gated-convolution", "hierarchical-softmax", "tcn"}
"""Runs of parts that an example registers, and that nobody else knows."""
FILES = [path for path in sorted(RESULTS.rglob("*.json")) if path.stem not in OF_EXAMPLES]
STORED = [path for path in FILES if "settings" in read_run(path)]


def test_there_are_stored_results() -> None:
    assert len(STORED) > 170


@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(RESULTS).as_posix() for path in STORED}))
def test_its_settings_build_a_model_of_the_same_parameters(folder: str) -> None:
    for path in (path for path in STORED if path.parent == RESULTS / folder):
        stored = read_run(path)
        if "parameters" not in stored:  # a run that diverged
            continue
        stored["settings"]["data"]["vocabulary_size"] = stored["data"]["vocabulary_size"]
        recipe = recipe_of(stored["settings"])
        model, _ = find_task(recipe.task).count(recipe)
        assert model.parameters_by_part() == stored["parameters"], path
