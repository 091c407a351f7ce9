"""Execute the notebooks anew, `make notebooks`; the tests do the same with smaller numbers."""

from __future__ import annotations

import ast
import base64
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 1800
"""A cell that takes longer has failed."""


def executed(path: Path, numbers: Mapping[str, Any] | None = None) -> nbformat.NotebookNode:
    """A notebook with fresh outputs; ``numbers`` take the place of the values in its cell of parameters."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(path, as_version=4)
    source = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    written = source.source
    if numbers is not None:
        source.source = "\n".join(f"{name} = {value!r}" for name, value in numbers.items())
        if names_in(written) != set(numbers):
            raise ValueError(f"{path.name} has other parameters than {', '.join(numbers)}.")
    NotebookClient(notebook, timeout=SECONDS, record_timing=False, resources={"metadata": {"path": FOLDER}}).execute()
    source.source = written
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        # Progress and warnings of other packages are not what a reader is shown.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for data in (output.data for output in cell.outputs if "image/png" in output.get("data", ())):
            data["image/png"] = in_few_colours(data["image/png"])
    return notebook


def in_few_colours(png: str) -> str:
    """A picture in a third of the bytes: 128 colours do for plots."""
    made = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128).save(made, "PNG", optimize=True)
    return base64.b64encode(made.getvalue()).decode()


def names_in(source: str) -> set[str]:
    """The names that a cell assigns."""
    stored = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return {node.id for node in stored if isinstance(node.ctx, ast.Store)}


if __name__ == "__main__":
    for path in NOTEBOOKS:
        print(path.name, flush=True)
        nbformat.write(executed(path), path)
