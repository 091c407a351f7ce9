"""Writes results/minilm/README.md and its picture from the JSON that results/minilm_contest.py wrote.

`contest.json` has the smaller sizes; `contest-large.json` the larger ones, on another text and with a later packing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marked import write_between_marks
from old_names import CONTESTANTS
from provenance import short_commit

from torchdefine.adapt.fitted import Measured, front_of, points_figure
from torchdefine.analysis.pictures import save_figure

FOLDER = Path(__file__).parent / "minilm"
MEASURES = ("cosine", "rank correlation", "retrieval, mean reciprocal rank", "classification, accuracy")
HEADER = ("table", "bytes", "tokens", "tokenizer", *MEASURES, "seconds")

INTRODUCTION = """# MiniLM's token table at equal bytes

`python results/minilm_tables.py` writes this page from `contest.json` and `contest-large.json`, which
`results/minilm_contest.py` wrote.

- "cosine" is the mean cosine between the sentence vectors of the old and of the new model. "rank correlation" is
  Spearman's, over the similarities of all pairs of sentences. Both use held-out sentences.
- Retrieval: the words of a WordNet synset are the query. The measure is how early its definition is found.
  Classification: each definition gets the lexicographer's file whose class centre is nearest. No table was fitted to
  these two tasks.
- (±) is half of a 95 % interval. For retrieval and classification it is the interval of the change from "full".
- "bytes" is the size of the packed table: our file, or the codes and scales of the other methods. "tokenizer" is the
  size of the tokenizer, which comes on top.
- `torchdefine adapt` makes "bits by importance". With `--thorough` it also distils: "bits by importance, distilled".

![All sizes together](front.svg)
"""


def cells(row: dict[str, Any]) -> list[str]:
    if row["bytes"] is None:
        return [row["name"], *["does not fit"], *["–"] * (len(HEADER) - 2)]
    found = row["measures"]
    numbers = [f"{found[name]['value']:.4f} (± {found[name]['high'] - found[name]['value']:.4f})" for name in MEASURES]
    sizes = [f"{row['bytes']:,}", f"{row['tokens']:,}", f"{row['tokenizer_bytes']:,}"]
    return [row["name"], *sizes, *numbers, f"{row['seconds']:.0f}"]


def section(title: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(HEADER) + " |", "|---" + "|---:" * (len(HEADER) - 1) + "|"]
    ordered = sorted(rows, key=lambda row: -row["measures"]["cosine"]["value"] if row["bytes"] else 1.0)
    return "\n".join([*lines, *("| " + " | ".join(cells(row)) + " |" for row in ordered), ""])


def note(result: dict[str, Any]) -> str:
    text, words = result["text"], result["wordnet"]
    parts = [
        f"{result['model']}; text {text['name']}, {text['sentences']:,} sentences: {text['measured_on']:,} measured,",
        f"{text['sensitivity_from']:,} for the sensitivity, {text['distilled_on']:,} to distil,",
        f"{text['counted']:,} counted; WordNet: {words['queries']:,} queries, {words['classified']:,} definitions",
        f"classified by {words['trained_on']:,}; {result['hardware']['cpu']}",
        f"({result['hardware']['cpu_threads']} threads), torch {result['versions']['torch']},",
        f"commit {short_commit(result['commit'])}. Seconds were taken on a machine that did other work too.",
    ]
    return " ".join(parts) + "\n"


WEAKER = "SVD, float16"
"""Left out of the short table, which has SVD at its best."""


def front_table(rows: list[dict[str, Any]], sizes: list[float], text: dict[str, Any]) -> str:
    """For the project's README: the cosine of each contestant at each size."""
    names = dict.fromkeys(row["name"] for row in rows if row["budget_mb"] in sizes)
    names.pop(WEAKER, None)
    found = {(row["name"], row["budget_mb"]): row for row in rows if row["bytes"]}
    lines = ["| table | " + " | ".join(f"{size:g} MB" for size in sizes) + " |", "|---" + "|---:" * len(sizes) + "|"]
    for name in names:
        values = (found.get((name, size)) for size in sizes)
        shown = " | ".join(f"{row['measures']['cosine']['value']:.4f}" if row else "–" for row in values)
        lines.append(f"| {name} | {shown} |")
    full = next(row for row in rows if row["name"] == "full")["bytes"]
    said = (
        f"The token table of the sentence encoder MiniLM takes {full / 1e6:.1f} MB. Each number is the mean cosine "
        f"between the sentence vectors of the old and the new model, on {text['measured_on']:,} held-out sentences. "
        "1 means equal, – means not run. `adapt` makes the first row, `adapt --thorough` the second "
        "([all measures](results/minilm/README.md)):\n\n"
    )
    return said + "\n".join(lines)


def of_the_folder(report: dict[str, Any]) -> str:
    """For the page on shrinking: what `adapt --rest int8` reported of MiniLM."""
    held_out = report["held_out"]
    before, after = (report[f"weights_bytes_{when}"] / 1e6 for when in ("before", "after"))
    cosine, ranks = (held_out[name] for name in MEASURES[:2])
    parts = [
        f"- Weights on disk: {before:.1f} → {after:.1f} MB",
        f"- On {held_out['sentences']:,} held-out sentences, with 95 % intervals:",
        f"    - cosine {cosine['value']:.4f} ({cosine['low']:.4f} to {cosine['high']:.4f})",
        f"    - rank correlation {ranks['value']:.4f} ({ranks['low']:.4f} to {ranks['high']:.4f})",
        "",
        "The text was the sample of WikiText-2 in the package ([report](../results/minilm/adapt-1.5mb-int8.json)).",
    ]
    return "\n".join(parts)


def budgets_of(result: dict[str, Any]) -> list[float]:
    """The sizes at which all compete, the largest first."""
    return sorted({row["budget_mb"] for row in result["rows"]}, reverse=True)[1:]


def sections(result: dict[str, Any], left_out: Sequence[float]) -> list[str]:
    """A table for each size, and where the rows are from."""
    whole = max(row["budget_mb"] for row in result["rows"])
    titles = {whole: "At the size that each has"} | {size: f"About {size:g} MB" for size in budgets_of(result)}
    made = [
        section(title, [row for row in result["rows"] if row["budget_mb"] == size])
        for size, title in titles.items()
        if size not in left_out
    ]
    return [*made, note(result)]


def with_our_names(contest: dict[str, Any]) -> dict[str, Any]:
    """A stored contest whose rows of ours are called as on all pages."""
    return {**contest, "rows": [{**row, "name": CONTESTANTS.get(row["name"], row["name"])} for row in contest["rows"]]}


def write_contest(first: dict[str, Any], later: dict[str, Any] | None = None) -> None:
    """The page, its picture, and the table of the project's README. Sizes of a later contest replace those before."""
    replaced = budgets_of(later) if later else []
    pages = sections(first, replaced) + (sections(later, []) if later else [])
    (FOLDER / "README.md").write_text("\n".join([INTRODUCTION, *pages]))
    rows = [row for row in first["rows"] if row["budget_mb"] not in replaced]
    rows += [row for row in later["rows"] if row["budget_mb"] in replaced] if later else []
    sizes = sorted({*budgets_of(first), *replaced}, reverse=True)
    write_between_marks(FOLDER.parent.parent / "README.md", "shrink", front_table(rows, sizes, first["text"]))
    points = [
        Measured(row["name"], row["name"], row["bytes"], 0, row["measures"]["cosine"]["value"], 0.0, row["seconds"])
        for row in rows
        if row["bytes"] and row["name"] != "full"
    ]
    save_figure(points_figure(points, front_of(points), "mean cosine"), FOLDER / "front.svg")


def main() -> None:
    report = json.loads((FOLDER / "adapt-1.5mb-int8.json").read_text())
    write_between_marks(FOLDER.parent.parent / "docs" / "shrink.md", "int8", of_the_folder(report))
    paths = [FOLDER / f"{name}.json" for name in ("contest", "contest-large")]
    if found := [with_our_names(json.loads(path.read_text())) for path in paths if path.exists()]:
        write_contest(*found)


if __name__ == "__main__":
    main()
