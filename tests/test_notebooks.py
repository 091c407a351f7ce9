"""The notebooks run, with smaller numbers than a reader's, and are committed with their pictures."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

pytest.importorskip("ipykernel")
from execute_notebooks import NOTEBOOKS, executed

from tests.adapt.test_shrink import bert_folder, text  # noqa: F401

MOST_BYTES = 300_000


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture
def many_words(tmp_path: Path) -> Path:
    """A short text of more words than the demo's first band has."""
    for split, lines in (("train", 300), ("valid", 30), ("test", 30)):
        words = [[f"w{(line * 10 + place) % 2500}" for place in range(10)] for line in range(lines)]
        (tmp_path / f"{split}.txt").write_text("\n".join(" ".join(line) for line in words) + "\n")
    return tmp_path


@pytest.fixture
def smaller(request: pytest.FixtureRequest, many_words: Path) -> dict[str, dict[str, Any]]:
    return {
        "drop-in": {"words_known": 500, "width": 16, "steps": 10},
        "read-a-report": {"text": str(many_words), "words_known": 3000, "steps": 10},
        "shrink": {"model_dir": str(request.getfixturevalue("bert_folder")), "budget": "5KB", "megabytes": (1, 2)},
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, smaller: dict[str, dict[str, Any]]) -> None:
    pytest.importorskip("transformers")
    run = executed(path, smaller[path.stem])
    assert pictures(run) == pictures(nbformat.read(path, as_version=4)) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size <= MOST_BYTES
