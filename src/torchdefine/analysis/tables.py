"""Tables for people: on a terminal, the same rows in HTML, and who owns the parameters of a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from torchdefine.embedding.token_embedding import PART_NAMES
from torchdefine.errors import printable
from torchdefine.plain import escaped, raw_stream

if TYPE_CHECKING:
    from torchdefine.embedding import Plan
    from torchdefine.task import Recipe, Tokens

NOT_FINITE = "not finite"
"""Stands in a column of numbers."""
FOLDED_WIDTH = 12
"""Of a column of words, at least."""


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Columns of numbers to the right, others to the left; the note below, if there is one.

    Words are folded where a terminal is narrow, numbers never: rather the lines become longer than it is wide.
    """
    from rich.cells import cell_len
    from rich.console import Console, ConsoleDimensions
    from rich.table import Table

    header, rows = [printable(name) for name in header], [[printable(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    needed = 2 * (len(header) - 1)  # between the columns
    for name, *cells in zip(header, *rows, strict=True):
        numeric = all(map(_is_number, cells))
        longest = max(cell_len(cell) for cell in (name, *cells))
        least = longest if numeric else min(longest, FOLDED_WIDTH)
        needed += least
        side = "right" if numeric else "left"
        table.add_column(name, justify=side, min_width=least, no_wrap=numeric, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    console = Console(file=raw_stream(sys.stdout), highlight=False, markup=False)  # a name may have brackets
    width, height = console.size
    console.size = ConsoleDimensions(max(width if console.is_terminal else 160, needed), height)
    console.print(table)
    if note:
        console.print(printable(note), style="dim")


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numeric = [all(map(_is_number, cells)) for _, *cells in zip(header, *rows, strict=True)]

    def line(tag: str, row: Sequence[str]) -> str:
        starts = (f"<{tag}{' class=number' if is_number else ''}>" for is_number in numeric)
        cells = "".join(f"{start}{escaped(cell)}</{tag}>" for start, cell in zip(starts, row, strict=True))
        return f"<tr>{cells}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<table>\n<thead>{line('th', header)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "0123456789–+-" or cell == NOT_FINITE


def parameter_report(recipe: Recipe, tokens: Tokens | None = None) -> tuple[dict[str, Any], Plan | None]:
    """Parameters by part, in millions, beside the published ones, with the exact counts; and the plan of the unit.

    The model is built without its memory; its vocabulary is the recipe's, or that of a run's ``tokens``.
    """
    from torchdefine.task import find_task

    model: Any
    with _Unfilled():
        model, size = find_task(recipe.task).count(recipe, tokens)
    counts = model.parameters_by_part()
    facts = {
        "recipe": recipe.name,
        "vocabulary_size": size,
        **{part: round(counts[part] / 1e6, 6) for part in PART_NAMES},
        **{f"published_{part}": recipe.published.get(part) for part in PART_NAMES},
        "counts": counts,
    }
    return facts, getattr(list(model.embeddings().values())[-1].unit, "plan", None)


class _Unfilled(TorchFunctionMode):
    """Draws no fresh weights: where there is no memory for them, torch would load its compiler to draw them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("normal_", "uniform_"):  # a tensor's own, or those of torch.nn.init
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def print_parameters(report: dict[str, Any], standing: str) -> None:
    rows = []
    for part, name in PART_NAMES.items():
        count, published = report["counts"][part], report[f"published_{part}"]
        paper = "–" if published is None else f"{published:.2f}"
        rows.append([name, f"{count / 1e6:.4f}", paper, f"{count / report['counts']['total']:.1%}"])
    vocabulary = f"with a vocabulary of {report['vocabulary_size']:,}"
    note = f"Millions of parameters of {report['recipe']} {vocabulary}: {standing}."
    print_table(["part", "ours", "paper", "fraction"], rows, note)
