"""The short form of the drill: with one seed, in half a minute. ``make drill`` is the long one."""

from pathlib import Path

import pytest

from tests.drill.artefacts import drill_exports
from tests.drill.inputs import drill_commands, drill_paths, drill_recipes
from tests.drill.mutations import drill_mutations
from tests.drill.room import Room, exports
from tests.drill.watch import Watch

SEED = 28


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    return Room(tmp_path_factory.mktemp("drill") / "room").make()


def assert_clean(watch: Watch, cases: int) -> None:
    assert not watch.failures, "\n\n".join(watch.failures[:10])
    assert watch.cases == cases
    assert watch.refusals > cases / 3


def test_mutated_runs_are_refused_or_as_they_were(room: Room, tmp_path: Path) -> None:
    assert_clean(drill_mutations(room.run, room.other, tmp_path, SEED, 100), 100)


@pytest.mark.skipif(not exports(), reason="this torch cannot export")
def test_mutated_exports_are_refused(room: Room, tmp_path: Path) -> None:
    assert_clean(drill_exports(room.export, room.other, tmp_path, SEED, 20), 20)


def test_odd_recipes_are_refused_or_read(tmp_path: Path) -> None:
    assert_clean(drill_recipes(tmp_path, SEED, 350), 350)


def test_odd_command_lines_end_in_a_sentence(room: Room, tmp_path: Path) -> None:
    assert_clean(drill_commands(room, tmp_path, SEED, 150), 150)


def test_odd_paths_are_refused(room: Room, tmp_path: Path) -> None:
    assert_clean(drill_paths(room, tmp_path, SEED, 100), 100)
