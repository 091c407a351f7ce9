"""The table of docs/demo.md from the file that the demo wrote: `make results`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marked import write_between_marks

from torchdefine.demo import HEADER, cells, sentences
from torchdefine.files import read_json


def write_demo_page(file: Path) -> None:
    found = read_json(file)
    write_between_marks(file.parents[1] / "docs" / "demo.md", "demo", "\n".join(demo_table(found["rows"])))


def demo_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [HEADER, ["---", *["---:"] * (len(HEADER) - 1)], *cells(rows)]
    return [*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {sentence}" for sentence in sentences(rows))]
