"""Tables for people: on a terminal, and the same rows in HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

NOT_FINITE = "not finite"
"""Stands in a column of numbers."""


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Columns of numbers to the right, others to the left; the note below, if there is one."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(header):
        numeric = all(_is_number(row[index]) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric or index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)  # a name may have brackets
    if not console.is_terminal:
        console.width = 160
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


def wide(table: str) -> str:
    """A table that scrolls by itself where the page is too narrow for it."""
    return f'<div class="wide" tabindex="0">{table}</div>'


def figure(svg: str) -> str:
    return f'<figure tabindex="0">{svg}</figure>'


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "0123456789–+-" or cell == NOT_FINITE
