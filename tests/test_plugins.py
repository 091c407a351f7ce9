"""Parts of other installed packages, found by their entry points."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchdefine import UserError, load_recipe
from torchdefine.context import CONTEXTS
from torchdefine.embedding import EMBEDDINGS
from torchdefine.output import OUTPUTS
from torchdefine.plugins import offered
from torchdefine.tables import METHODS, table_method
from torchdefine.task import _TASKS, find_task, task_names

CODE = """
import dataclasses
from torchdefine.config import Config, setting
from torchdefine.context import LSTM
from torchdefine.embedding.map import MapConfig, StandardMap
from torchdefine.output import FullConfig
from torchdefine.tables import Entry
from torchdefine.tables.low_rank import LowRank
from torchdefine.tasks.language.task import LanguageTask

@dataclasses.dataclass(frozen=True)
class Map(MapConfig):
    kind: str = "theirs"
    width: int = setting(8, "Width of the table.", at_least=1)

    def build(self, vocabulary, width):
        return StandardMap(vocabulary.size, self.width)

@dataclasses.dataclass(frozen=True)
class Context(Config):
    kind: str = "theirs"

    def build(self, input_dim, tied_dim):
        return LSTM(input_dim, output_dim=tied_dim)

@dataclasses.dataclass(frozen=True)
class Output(FullConfig):
    kind: str = "theirs"

METHOD = Entry(LowRank, "a low rank, by another package", in_fit=False)

class Task(LanguageTask):
    name = "theirs"
"""
PARTS = {
    "embedding": "Map",
    "context_model": "Context",
    "output_layer": "Output",
    "table_method": "METHOD",
    "task": "Task",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with one part of every sort, installed; and one that is broken."""
    (tmp_path / "their_parts.py").write_text(textwrap.dedent(CODE))
    about = tmp_path / "their_parts-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-parts\nVersion: 1.0\n")
    groups = [f"[torchdefine.{part}]\ntheirs = their_parts:{name}\n" for part, name in PARTS.items()]
    (about / "entry_points.txt").write_text("\n".join([*groups, "[torchdefine.unit]\nbroken = their_parts:Nothing\n"]))
    monkeypatch.syspath_prepend(tmp_path)
    offered.cache_clear()
    registries = [kinds._kinds for kinds in (EMBEDDINGS, CONTEXTS, OUTPUTS)] + [METHODS, _TASKS]
    yield
    offered.cache_clear()
    for registry in registries:
        registry.pop("theirs", None)


@pytest.mark.usefixtures("package")
def test_parts_of_another_package_are_found_by_name() -> None:
    assert {"theirs", "standard"} <= set(EMBEDDINGS)
    recipe = load_recipe(
        "demo/standard", {"embedding": {"kind": "theirs", "width": "12"}, "context": "theirs", "output": "theirs"}
    )
    assert recipe.embedding.width == 12
    assert type(recipe.context).__name__ == "Context"
    assert type(recipe.output).__name__ == "Output"
    with pytest.raises(UserError, match=r"embedding\.width is 0, but must be at least 1"):
        load_recipe("demo/standard", {"embedding": {"kind": "theirs", "width": 0}})
    assert "theirs" in task_names()
    assert find_task("theirs").name == "theirs"
    assert type(table_method("theirs")).__name__ == "LowRank"


@pytest.mark.usefixtures("package")
def test_a_broken_part_is_refused_when_it_is_asked_for() -> None:
    load_recipe("demo/standard")
    with pytest.raises(UserError, match="The unit 'broken' of the package their-parts cannot be loaded"):
        load_recipe("demo/standard", {"unit": "broken"})


@pytest.mark.usefixtures("package")
def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(UserError, match="did you mean 'theirs'"):
        load_recipe("demo/standard", {"context": "their"})
    with pytest.raises(UserError, match="did you mean 'theirs'"):
        table_method("their")
