"""The short form of the drill: with one seed, in half a minute. ``make drill`` is the long one."""

import shutil
from pathlib import Path

import pytest

from tests.drill.inputs import drill_commands, drill_recipes
from tests.drill.mutations import contents, drill_mutations
from tests.drill.watch import Watch
from torchdefine import train

SEED = 28


@pytest.fixture(scope="module")
def runs(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("drill")
    for name in ("one", "other"):
        train(recipe_file, out=folder / name, train={"steps": 4, "checkpoint_every": 2, "log_every": 1})
    return folder / "one", folder / "other"


def assert_clean(watch: Watch, cases: int) -> None:
    assert not watch.failures, "\n\n".join(watch.failures[:10])
    assert watch.cases == cases
    assert watch.refusals > cases / 3


def test_mutated_runs_are_refused_or_as_they_were(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert_clean(drill_mutations(*runs, tmp_path, SEED, 100), 100)


def test_odd_recipes_are_refused_or_read(tmp_path: Path) -> None:
    assert_clean(drill_recipes(tmp_path, SEED, 350), 350)


def test_odd_command_lines_end_in_a_sentence(
    runs: tuple[Path, Path], recipe_file: Path, corpus: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    before = contents(run)
    assert_clean(drill_commands(run, recipe_file, corpus, tmp_path, SEED, 150), 150)
    after = contents(run)
    assert {name: after.get(name) for name in before} == before
