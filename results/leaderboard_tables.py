"""Writes results/leaderboard/README.md and the short table of the project's README from the JSON of `leaderboard`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leaderboard.methods import all_methods
from marked import write_between_marks
from provenance import short_commit

FOLDER = Path(__file__).parent / "leaderboard"
TABLES = ("minilm", "ja_ginza", "energetic", "language-model", "demo", "compared-lstm")
SHORT, SHORT_SIZES = "minilm", (4e6, 3e6, 2e6, 1.5e6, 1e6)
IN_SHORT = ("bits", "distilled", "svd_by_counts", "trimmed", "product_quantisation", "pca")
METHODS = all_methods()

INTRODUCTION = """# Table methods at equal bytes

`python -m leaderboard` writes the JSON files in this folder. `make results` writes this page from them.
[How to measure, and how to add a method](../../docs/leaderboard.md).

- "bytes" is the size of the packed table: codes, scales, codebooks and projections. The header of a file comes on top.
- (±) is half of a 95 % interval. If the unpacked table has the measure too, it is the interval of the change.
- `torchdefine adapt` makes "bits by importance". `adapt --thorough` also distils: "bits by importance, distilled".
- "trimmed + int4" keeps the most frequent tokens, in torchao's 4 bits. "SVD by counts, 4 bits" is a low rank, weighted
  by token counts. "PCA as model2vec, int8" reduces the width as model2vec does.
- [The measures](#measures) are explained at the end.
"""
MEASURES = """## Measures

- **cosine**: the mean cosine between the sentence vectors of the old and of the new model. **rank correlation**:
  Spearman's, over the similarities of all pairs of sentences. Both use held-out sentences.
- **retrieval**: the words of a WordNet synset are the query. The measure is how early its definition is found.
  **classification**: each definition gets the lexicographer's file whose class centre is nearest. No table was fitted
  to these two tasks.
- **cosine of rows**: the mean cosine between rows before and after. **same neighbours**: the fraction of their ten
  nearest rows that stay. **cosine of sentences**: compares the means over the tokens of held-out sentences. Only
  vectors are compared here, without a model.
- **KL**, **perplexity**, **top-1 agreement**: of the predicted tokens of held-out sentences.
- **test perplexity**: of a run of torchdefine, on its whole test text. It has no interval.

"tokenizer" is the size of the tokenizer in bytes, which comes on top. The seconds were taken on busy machines.
"""
LOWER = ("KL", "perplexity", "test perplexity")
"""Measures of which less is better."""

Row = dict[str, Any]


def results_of(table: str) -> list[dict[str, Any]]:
    """The files of a table, each of one method."""
    return [json.loads(path.read_text()) for path in sorted((FOLDER / table).glob("*.json"))]


def rows_of(results: Sequence[dict[str, Any]]) -> list[Row]:
    """All rows, with their methods' names."""
    return [row | {"method": one["method"]["name"]} for one in results for row in one["rows"]]


def has_own_sizes(row: Row) -> bool:
    return METHODS[row["method"]].sizes is not None


def section(table: str) -> Iterator[str]:
    results = results_of(table)
    if not results:
        yield f"## {table}\n\nNot run.\n"
        return
    facts, rows = results[0]["table"], rows_of(results)
    count, width = facts["shape"]
    yield f"## {facts['title']}, {count:,} × {width}\n"
    if own := [row for row in rows if has_own_sizes(row)]:
        yield f"### At sizes of their own\n\n{rows_table(own)}"
    rest = [row for row in rows if not has_own_sizes(row)]
    for budget in sorted({row["budget"] for row in rest}, reverse=True):
        some = [row for row in rest if row["budget"] == budget]
        there = {row["method"] for row in some}
        missing = [one.title for name, one in METHODS.items() if name not in there and not one.sizes]
        lacks = f"\nNot run, or not for such a table: {'; '.join(missing)}.\n" if missing else ""
        yield f"### {budget:,} bytes\n\n{rows_table(some)}{lacks}"
    yield origin(facts, rows)


def rows_table(rows: Sequence[Row]) -> str:
    """The best by the first measure first."""
    measured = [row for row in rows if row["bytes"]]
    measures = list(measured[0]["measures"])
    tokenizers = ["tokenizer"] if "tokenizer_bytes" in measured[0] else []
    header = ["table", "bytes", "rows", *tokenizers, *measures, "s"]
    sign = 1 if measures[0] in LOWER else -1
    measured.sort(key=lambda row: sign * row["measures"][measures[0]]["value"])
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for row in measured:
        tokenizer = [f"{row['tokenizer_bytes']:,}"] if tokenizers else []
        numbers = (number(row["measures"][one]) for one in measures)
        lines.append(
            [name_of(row), f"{row['bytes']:,}", f"{row['rows']:,}", *tokenizer, *numbers, f"{row['seconds']:.0f}"]
        )
    for row in rows:
        if not row["bytes"]:
            lines.append([METHODS[row["method"]].title, "does not fit", *["–"] * (len(header) - 2)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def name_of(row: Row) -> str:
    title, label = METHODS[row["method"]].title, row["label"]
    return title if label in ("", title) else f"{title} ({label})"


def number(measure: dict[str, Any]) -> str:
    half = (measure["high"] - measure["low"]) / 2
    return f"{measure['value']:.4f} (± {half:.4f})" if half else f"{measure['value']:.4f}"


def origin(facts: dict[str, Any], rows: Sequence[Row]) -> str:
    """Where the table, its texts and its rows are from."""
    said = [f"{name} {short(value)}" for name, value in facts.items() if name not in ("title", "shape")]
    commits = sorted({short_commit(row["commit"]) for row in rows})
    machines = sorted({f"{row['hardware']['cpu']} ({row['hardware']['cpu_threads']} threads)" for row in rows})
    torches = sorted({row["versions"]["torch"] for row in rows})
    return "; ".join([*said, f"commits {', '.join(commits)}", *machines, f"torch {', '.join(torches)}"]) + ".\n"


def short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {short(one)}" for name, one in value.items())
    return f"{value[:12]}…" if isinstance(value, str) and re.fullmatch("[0-9a-f]{40,64}", value) else str(value)


def short_table() -> str:
    """For the project's README: MiniLM's cosine by each method at each size."""
    results = results_of(SHORT)
    facts, found = (
        results[0]["table"],
        {(row["method"], row["budget"]): row for row in rows_of(results) if row["bytes"]},
    )
    count, width = facts["shape"]
    said = (
        f"The token table of the sentence encoder MiniLM takes {4 * count * width / 1e6:.1f} MB. Each number is the "
        "mean cosine between the sentence vectors of the old and the new model, on "
        f"{facts['text']['measured_on']:,} held-out sentences. 1 means equal, – means not run. "
        "`adapt` makes the first row, `adapt --thorough` the second "
        "([all measures](results/leaderboard/README.md)):\n"
    )
    lines = [said, "| table | " + " | ".join(f"{size / 1e6:g} MB" for size in SHORT_SIZES) + " |"]
    lines.append("|---" + "|---:" * len(SHORT_SIZES) + "|")
    for name in IN_SHORT:
        rows = (found.get((name, size)) for size in SHORT_SIZES)
        shown = " | ".join(f"{row['measures']['cosine']['value']:.4f}" if row else "–" for row in rows)
        lines.append(f"| {METHODS[name].title} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parts = [INTRODUCTION, *(part for table in TABLES for part in section(table)), MEASURES]
    (FOLDER / "README.md").write_text("\n".join(parts))
    write_between_marks(FOLDER.parent.parent / "README.md", "shrink", short_table())


if __name__ == "__main__":
    main()
