"""The version stands in four files, and is one."""

import re
import tomllib
from pathlib import Path

import yaml

import torchdefine

ROOT = Path(__file__).parents[1]


def test_all_files_name_one_version() -> None:
    version = torchdefine.__version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.findall(r"^## (\d\S*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version


def test_the_changelog_is_short() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 120
