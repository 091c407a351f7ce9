"""Writes the measured parts of docs/shrink.md from the reports of `torchdefine adapt` in results/shrink."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marked import write_between_marks

from torchdefine.adapt.measures import Measure, explained

FOLDER = Path(__file__).parent / "shrink"
PAGE = FOLDER.parent.parent / "docs" / "shrink.md"


def number(measure: dict[str, Any], places: int = 4) -> str:
    return f"{measure['value']:.{places}f} (± {(measure['high'] - measure['low']) / 2:.{places}f})"


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
    """The tied model at some bits per number."""
    model = facts["model"]
    lines = [
        "| bits per number | table, bytes | perplexity | change | KL | top-1 agreement |",
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
        f"We trained a small GPT-2 on a CPU: {model['parameters'] / 1e6:.1f} M parameters, {model['n_layer']} "
        f"layers of width {model['n_embd']}, a tied table of {model['vocab_size']:,} × {model['n_embd']}, "
        f"{facts['text']['tokens'] / 1e6:.1f} M tokens of {facts['text']['name']}. Its perplexity on the held-out "
        f"sentences is {was:.1f}.\n"
    )
    return "\n".join([what, *lines])


def main() -> None:
    names = ("sentences", "int8", "classifier", "vocabulary")
    said = {name: outcome(report) for name in names if (report := found(name))}
    if facts := found("tied-gpt2"):
        reports = {bits: report for bits in (4, 3, 2) if (report := found(f"gpt2-{bits}bits"))}
        said["language"] = language_model(facts, reports)
    if report := found("sentences"):
        said["printed"] = printed(report)
    for name in (*names, "printed", "language"):
        write_between_marks(PAGE, name, said.get(name, "Not run."))


if __name__ == "__main__":
    main()
