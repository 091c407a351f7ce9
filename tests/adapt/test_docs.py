"""The pages about models that exist: their code runs, and their numbers are those that come out."""

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from torchdefine import replace_embeddings
from torchdefine.tables import METHODS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("replace.md", "transformers.md", "adapt.md", "run-elsewhere.md", "compact-tables.md")
NEED_A_TRAINED_MODEL = {
    *("A smaller trained model", "Fewer tokens", "Find the best for a size"),
    *("Export a folder to transformers, with code", "sentence-transformers"),
}
"""Sections whose code starts from a model, a text or counts of the reader's own."""


def sections() -> dict[tuple[str, str], str]:
    """The Python of each section that has some, its blocks one after the other, by page and heading."""
    found = {}
    for page in PAGES:
        for section in re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)[1:]:
            heading = section.splitlines()[0]
            if code := "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)):
                found[page, heading] = code
    return found


SECTIONS = sections()


def test_the_sections_are_found() -> None:
    headings = {heading for _, heading in SECTIONS}
    assert headings > NEED_A_TRAINED_MODEL
    assert headings >= {"Any module", "Save, load and cache your own model", "Models of transformers"}


@pytest.mark.parametrize(("page", "heading"), SECTIONS)
def test_the_code_of_a_section_runs(page: str, heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "transformers.md":
        pytest.importorskip("sentence_transformers" if heading == "sentence-transformers" else "transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(METHODS, "halves", METHODS["int8"])  # what a section adds is taken out again
    program = ast.parse(SECTIONS[page, heading])
    if heading in NEED_A_TRAINED_MODEL:  # then what it imports must at least be there
        program.body = [line for line in program.body if isinstance(line, ast.Import | ast.ImportFrom)]
        assert program.body
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The replacement of")
        exec(compile(program, f"{page}: {heading}", "exec"), {"__name__": "docs"})


def saving_row(rows: int, width: int, map_dim: int, expand_dim: int | None) -> str:
    """A row of the table in docs/replace.md, computed without memory."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(rows, width))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = replace_embeddings(model, map_dim=map_dim, expand_dim=expand_dim)
    define = model[0].table
    unit = sum(parameter.numel() for parameter in define.unit.parameters())
    chosen = f"{expand_dim}" if expand_dim else f"{define.plan.config.expand_dim} (default)"
    saved, after = rows * (width - map_dim), report.parameters_after
    assert (saved > unit) == (after < rows * width)  # the rule of thumb itself
    sizes = f"{rows:,} × {width} = {rows * width:,}"
    return f"| {sizes} | {map_dim} | {chosen} | {saved:,} | {unit:,} | {after:,} |"


@pytest.mark.parametrize(
    ("rows", "width", "map_dim", "expand_dim"),
    [(1_010, 128, 64, None), (1_010, 128, 32, 128), (10_000, 128, 64, None), (30_000, 256, 64, None),
     (50_257, 768, 128, None)],
)  # fmt: skip
def test_the_examples_of_what_is_saved(rows: int, width: int, map_dim: int, expand_dim: int | None) -> None:
    assert saving_row(rows, width, map_dim, expand_dim) in (DOCS / "replace.md").read_text()
