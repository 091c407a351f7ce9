"""The README and the code of the pages run as they say, and what they call a setting is one."""

import contextlib
import copy
import functools
import io
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdefine
from torchdefine import DeFINE
from torchdefine.cli.command_line import make_parser
from torchdefine.context import CONTEXTS
from torchdefine.task import find_task, task_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = {name for task in task_names() for name in find_task(task).recipe.settings()}
SECTIONS = {name.split(".")[0] for name in SETTINGS}
NO_SETTINGS = {"train.txt", "embedding.weight", "embedding.map", "embedding.safetensors"}


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


def test_the_readme_says_where_a_unit_of_the_usual_sizes_costs_more_than_it_saves() -> None:
    def grows(words: int, width: int) -> bool:
        return sum(p.numel() for p in DeFINE(words, width, device="meta").parameters()) > words * width

    assert "With three thousand words or fewer" in README
    widths = (128, 256, 384, 512, 768, 1024)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert any(grows(3000, width) for width in widths)
        assert not any(grows(3200, width) for width in widths)


def test_the_readmes_commands_are_understood() -> None:
    parser, _ = make_parser()
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


def python_of(page: str) -> str:
    """The Python of a page, its blocks one after the other."""
    text = (ROOT / "docs" / page).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("page", ["unit.md", "transformer-xl.md", "token-functions.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    exec(compile(python_of(page), page, "exec"), {"__name__": "docs"})


def test_the_code_on_large_tables_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo")
    try:
        names: dict[str, Any] = {"__name__": "docs"}
        exec(compile(python_of("large-tables.md"), "large-tables.md", "exec"), names)
        names["model"](torch.tensor([3, 3])).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    sums = names["tables"].state_dict()["state"][0]["sum"]  # of the table in host memory
    assert 1400 < int(sums.count_nonzero()) <= 3 * 512


def test_a_context_model_of_ones_own_trains_as_the_page_says(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"data": corpus, "train": {"steps": 2}, "embedding": {"kind": "standard"}, "output": {"kind": "full"}}
    monkeypatch.setattr(torchdefine, "train", functools.partial(torchdefine.train, **small), raising=False)
    monkeypatch.setattr(CONTEXTS, "_kinds", copy.copy(CONTEXTS._kinds))
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL | re.MULTILINE)
    page: dict = {"__name__": "docs"}
    exec(compile(code[-1], "training.md", "exec", dont_inherit=True), page)
    assert isinstance(page["run"].model.context, page["GRU"])
