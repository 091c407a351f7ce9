"""What the README and the docs call a setting is one."""

import re
from pathlib import Path

import pytest

from torchdefine.task import find_task, task_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = {name for task in task_names() for name in find_task(task).recipe.settings()}
SECTIONS = {name.split(".")[0] for name in SETTINGS}
NO_SETTINGS = {"train.txt", "embedding.weight", "embedding.safetensors"}


def settings_in(text: str) -> set[str]:
    """``--section.name`` and `` `section.name` ``, the latter perhaps with a value."""
    found = re.findall(r"--(\w+\.\w+)|`(\w+\.\w+)(?=[`: ])", text)
    return {name for pair in found for name in pair if name.split(".")[0] in SECTIONS} - NO_SETTINGS


def test_settings_are_found_in_a_text() -> None:
    text = "`optim.lr`, --train.steps 3, `unit.kind: none`, `optim.step()` and `embedding.weight`"
    assert settings_in(text) == {"optim.lr", "train.steps", "unit.kind"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_settings_of_a_page_exist(page: Path) -> None:
    assert settings_in(page.read_text()) <= SETTINGS
