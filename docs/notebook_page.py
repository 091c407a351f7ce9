"""A notebook as a page of the site: its text, code, outputs and pictures."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def notebook_page(notebook: Path, pictures: Path) -> str:
    """Markdown, with links as the notebook has them; its pictures are written into a folder."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n".join(line for number, cell in enumerate(cells) for line in _cell(cell, pictures / f"{number}.png"))


def _cell(cell: dict[str, Any], picture: Path) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield f"{source}\n"
        return
    yield f"```python\n{source}\n```\n"
    printed = "".join(_text(output) for output in cell["outputs"])
    if printed.strip():
        yield f"```text\n{COLOURS.sub('', printed).rstrip()}\n```\n"
    for output in cell["outputs"]:
        if png := output.get("data", {}).get("image/png"):
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(base64.b64decode("".join(png)))
            yield f"![A picture that the cell above draws]({picture})\n"


def _text(output: dict[str, Any]) -> str:
    """What an output prints; a picture has a text too, which says nothing."""
    data = output.get("data", {})
    return "" if "image/png" in data else "".join(output.get("text", data.get("text/plain", "")))
