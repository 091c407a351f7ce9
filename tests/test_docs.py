"""The README runs as it says, and what it and the docs call a setting is one."""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from torchdefine.cli.command_line import _parser
from torchdefine.task import find_task, task_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = {name for task in task_names() for name in find_task(task).recipe.settings()}
SECTIONS = {name.split(".")[0] for name in SETTINGS}
NO_SETTINGS = {"train.txt", "embedding.weight", "embedding.safetensors"}


README = (ROOT / "README.md").read_text()


def test_the_readme_fits_three_screens() -> None:
    assert len(README.splitlines()) <= 120


def test_the_readmes_code_runs_and_prints_what_it_says() -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", README, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text", "python"]
    names: dict[str, Any] = {}
    printed = io.StringIO()
    for kind, block in blocks:
        if kind == "text":
            assert printed.getvalue() == block
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), names)
    size = sum(parameter.numel() for parameter in names["embedding"].parameters())
    assert f"{size / 1e6:.1f} M parameters instead of {267_735 * 384 / 1e6:.1f} M" in README


def test_the_readmes_commands_are_understood() -> None:
    parser, _ = _parser()
    commands = re.findall(r"^torchdefine (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(commands) > 5
    for command in commands:
        parser.parse_args(shlex.split(command))


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
