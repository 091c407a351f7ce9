"""Writes results/shrink/README.md and the measured parts of docs/shrink.md from the JSON in results/shrink."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marked import write_between_marks
from old_names import CONTESTANTS
from provenance import short_commit

from torchdefine.adapt.measures import Measure, explained

FOLDER = Path(__file__).parent / "shrink"
PAGE = FOLDER.parent.parent / "docs" / "shrink.md"
TABLES = ("ja_ginza", "energetic")

INTRODUCTION = """# Other tables and models, smaller

`python results/shrink_tables.py` writes this page from the JSON beside it. `results/table_contest.py` wrote that of the
two tables, `results/tied_gpt2.py` that of the language model, and `torchdefine adapt` the others: they are its reports.

## Two more tables at equal bytes

Only the vectors are compared, without a model. "cosine of rows" is the mean cosine between {rows:,} rows before and
after. "same neighbours" is the fraction of their ten nearest rows that stay. "cosine of sentences" and "rank
correlation" compare the means over the tokens of held-out sentences. (±) is half of a 95 % interval. The vectors
are not stored here. A method without a row at a size was not run at that size.
"""


def number(measure: dict[str, Any], places: int = 4) -> str:
    return f"{measure['value']:.{places}f} (± {(measure['high'] - measure['low']) / 2:.{places}f})"


def contest(result: dict[str, Any]) -> str:
    measures = list(next(row for row in result["rows"] if row["bytes"])["measures"])
    lines = [
        f"### {result['table'][0].upper()}{result['table'][1:]}, {result['shape'][0]:,} × {result['shape'][1]}",
        "",
        "| table | bytes | " + " | ".join(measures) + " |",
        "|---|---:" + "|---:" * len(measures) + "|",
    ]
    for row in sorted(result["rows"], key=lambda row: -(row["bytes"] or row["budget"])):
        name = CONTESTANTS.get(row["name"], row["name"])
        if row["bytes"]:
            cells = [name, f"{row['bytes']:,}", *(number(row["measures"][one]) for one in measures)]
        else:
            cells = [name, f"{row['budget']:,} do not suffice", *["–"] * len(measures)]
        lines.append("| " + " | ".join(cells) + " |")
    origin = f"{result['package']}, SHA-256 {result['sha256'][:16]}…; commit {short_commit(result['commit'])}."
    return "\n".join([*lines, "", origin, ""])


def found(name: str) -> dict[str, Any] | None:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def outcome(report: dict[str, Any]) -> str:
    """What a report of ``adapt`` says, as a list."""
    before, after = (report[f"weights_bytes_{when}"] / 1e6 for when in ("before", "after"))
    held_out = dict(report["held_out"])
    sentences = held_out.pop("sentences")
    lines = []
    for name, one in held_out.items():
        was = "" if one["before"] is None else f"; before: {one['before']:.4f}"
        lines.append(f"    - {name} {one['value']:.4f} ({one['low']:.4f} to {one['high']:.4f}{was})")
    whole, table = (sum(one[f"bytes_{when}"] for one in report["tables"]) for when in ("before", "after"))
    return "\n".join(
        [
            f"- Token table: {whole / 1e6:.1f} → {table / 1e6:.1f} MB",
            f"- Weights on disk: {before:.1f} → {after:.1f} MB",
            f"- On {sentences:,} held-out sentences, with 95 % intervals:",
            *lines,
        ]
    )


def printed(report: dict[str, Any]) -> str:
    """The measures of a report as the command prints them."""
    held_out = dict(report["held_out"])
    sentences = held_out.pop("sentences")
    lines = explained({name: Measure(**one) for name, one in held_out.items()})
    first = f"Compared with the old model on {sentences:,} held-out sentences, with 95 % intervals:"
    return "\n".join(["```", first, *(f"  {line}" for line in lines), "```"])


def language_model(facts: dict[str, Any], reports: dict[int, dict[str, Any]]) -> str:
    """The tied model at some bits a number."""
    model = facts["model"]
    lines = [
        "| bits a number | table, bytes | perplexity | change | KL | top-1 agreement |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for bits, report in sorted(reports.items(), reverse=True):
        said, size = report["held_out"], report["tables"][0]["bytes_after"]
        perplexity = said["perplexity"]
        change = perplexity["value"] / perplexity["before"] - 1
        cells = (str(bits), f"{size:,}", number(perplexity, 2), f"{change:+.2%}", number(said["KL"]))
        lines.append("| " + " | ".join([*cells, number(said["top-1 agreement"])]) + " |")
    was = next(iter(reports.values()))["held_out"]["perplexity"]["before"]
    what = (
        f"A GPT-2 of a CPU's size, trained here: {model['parameters'] / 1e6:.1f} M parameters, {model['n_layer']} "
        f"layers of {model['n_embd']}, a tied table of {model['vocab_size']:,} × {model['n_embd']}, "
        f"{facts['text']['tokens'] / 1e6:.1f} M tokens of {facts['text']['name']}. Its perplexity on the held-out "
        f"sentences is {was:.1f}.\n"
    )
    return "\n".join([what, *lines])


def main() -> None:
    tables = [result for name in TABLES if (result := found(name))]
    page = [INTRODUCTION.format(rows=tables[0]["rows_compared"]), *map(contest, tables)]
    said = {name: outcome(report) for name in ("sentences", "classifier", "vocabulary") if (report := found(name))}
    if facts := found("tied-gpt2"):
        reports = {bits: report for bits in (4, 3, 2) if (report := found(f"gpt2-{bits}bits"))}
        said["language"] = language_model(facts, reports)
        page += ["## A language model with a tied table", "", said["language"], ""]
    if report := found("sentences"):
        said["printed"] = printed(report)
    for name in ("sentences", "printed", "language", "vocabulary", "classifier"):
        write_between_marks(PAGE, name, said.get(name, "Not run."))
    (FOLDER / "README.md").write_text("\n".join(page).rstrip() + "\n")


if __name__ == "__main__":
    main()
