"""The workflows cannot run here: a schema and a linter check them, and they test what they should."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]


def passes(command: str, *arguments: str | Path) -> None:
    program = Path(sys.executable).with_name(command)
    if not program.exists():
        pytest.skip(f"needs {command}, of the extra dev")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflows_follow_their_schema() -> None:
    passes("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)


def test_the_workflows_are_safe() -> None:
    passes("zizmor", "--offline", "--no-progress", "--config", ROOT / ".github" / "zizmor.yml", *WORKFLOWS)


def test_the_oldest_and_the_newest_of_everything_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cells = JOBS["test"]["strategy"]["matrix"]["include"]
    [oldest_torch] = [one.removeprefix("torch>=") for one in project["dependencies"] if one.startswith("torch>=")]
    [pinned] = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pythons = [one.rsplit(" ", 1)[1] for one in project["classifiers"] if re.search(r"Python :: 3\.\d+$", one)]
    assert {cell["os"].removesuffix("-latest") for cell in cells} == {"ubuntu", "macos", "windows"}
    assert {cell["torch"] for cell in cells} == {f"{oldest_torch}.0", pinned}
    assert {min(pythons), max(pythons)} <= {cell["python"] for cell in cells} <= set(pythons)
    assert f">={min(pythons)}" == project["requires-python"]


def test_every_command_of_make_in_the_workflows_is_a_target() -> None:
    called = {
        word
        for job in JOBS.values()
        for step in job["steps"]
        for word in re.findall(r"make (\w+)", step.get("run", ""))
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"lint", "docs", "wheel"} <= called <= targets
