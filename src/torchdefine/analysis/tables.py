"""Tables for people: on a terminal, and the same rows in HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

NOT_FINITE = "not finite"
"""Stands in a column of numbers."""
GAP = 2
"""Spaces between two columns."""
FOLDED_WIDTH = 12
"""Of a column of words, at least."""


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Columns of numbers to the right, others to the left; the note below, if there is one.

    Words are folded where a terminal is narrow, numbers never: rather the lines become longer than it is wide.
    """
    from rich.cells import cell_len
    from rich.console import Console, ConsoleDimensions
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    needed = GAP * (len(header) - 1)
    for index, name in enumerate(header):
        numeric = all(_is_number(row[index]) for row in rows)
        longest = max(cell_len(cell) for cell in (name, *(row[index] for row in rows)))
        least = longest if numeric else min(longest, FOLDED_WIDTH)
        needed += least
        table.add_column(
            name, justify="right" if numeric else "left", min_width=least, no_wrap=numeric, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)  # a name may have brackets
    width, height = console.size
    console.size = ConsoleDimensions(max(width if console.is_terminal else 160, needed), height)
    console.print(table)
    if note:
        console.print(note, style="dim")


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numeric = [all(_is_number(row[index]) for row in rows) for index in range(len(header))]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if is_number else ''}>{html.escape(cell)}</{tag}>"
            for cell, is_number in zip(row, numeric, strict=True)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>\n<thead><tr>{cells('th', header)}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "0123456789–+-" or cell == NOT_FINITE
