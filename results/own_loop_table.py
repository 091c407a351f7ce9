"""Writes the table under the user's own loop in docs/benchmarks.md from its rows: `make results`."""

from __future__ import annotations

from typing import Any

from benchmark_tables import ROWS, hardware, newest, read
from marked import write_between_marks
from provenance import short_commit

PAGE = ROWS.parent.parent / "docs" / "benchmarks.md"
IS_COMPILED = ", compiled"


def loop_table(record: dict[str, Any]) -> str:
    """A line for each table, with its time eager and compiled."""
    (group,) = record["groups"].values()
    rows, lines = group["rows"], ["| table | parameters | eager | compiled |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        if not name.endswith(IS_COMPILED):
            compiled = rows.get(name + IS_COMPILED)
            then = "not run" if compiled is None else f"{compiled['ms']:.2f} ms"
            size = f"{row['facts']['parameters'] / 1e6:.2f} M"
            lines.append(f"| {name} | {size} | {row['ms']:.2f} ms | {then} |")
    where = f"A training step of this loop on {hardware(record)}: {group['note']}. Medians, commit"
    return "\n".join([f"{where} {short_commit(record['commit'])}.", "", *lines])


def page_part(records: list[dict[str, Any]]) -> str:
    parts = [loop_table(record) for record in newest(records).values() if not record["small"]]
    return "\n\n".join(parts) or "Not yet run."


def main() -> None:
    path = ROWS / "own-loop.jsonl"
    write_between_marks(PAGE, "own loop", page_part(read(path) if path.exists() else []))


if __name__ == "__main__":
    main()
