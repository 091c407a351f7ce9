"""Runs side by side: what they have, what they reached, and whether the comparison is fair."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.analysis.parameters import PARTS
from torchdefine.analysis.tables import html_table, print_table
from torchdefine.errors import UserError
from torchdefine.files import write_text
from torchdefine.training import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, distinct for every kind of colour vision."""
LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Comparison:
    """Finished runs in the order given."""

    names: list[str]
    results: list[dict[str, Any]]

    @property
    def warnings(self) -> list[str]:
        """Why the numbers may not be comparable; empty if nothing speaks against it."""
        found = []
        for what, value in (
            ("were trained on different texts", lambda r: r["data"]["splits"].get("train")),
            ("have different vocabularies, so their perplexities do not compare", _vocabulary),
            ("were trained for different numbers of tokens", lambda r: r["tokens"]),
            ("were evaluated by different protocols", lambda r: r["evaluation"].get("test", {}).get("protocol")),
        ):
            if any(value(result) != value(self.results[0]) for result in self.results):
                found.append(f"The runs {what}.")
        return found

    @property
    def unigram(self) -> float | None:
        return self.results[0].get("test_unigram_perplexity")

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows for people; the best perplexities are marked."""
        header = ["run", "unit", "context", "tables", "total M", "valid", "test", "bits/byte", "tokens/s", "seconds"]
        best = {
            split: min((r.get(f"{split}_perplexity") or float("inf")) for r in self.results)
            for split in ("valid", "test")
        }
        rows = []
        for name, result in zip(self.names, self.results, strict=True):
            rows.append(
                [
                    name,
                    *(f"{result['parameters'][part] / 1e6:.3f}" for part in PARTS),
                    *(_perplexity(result.get(f"{split}_perplexity"), best[split]) for split in ("valid", "test")),
                    _number(result["evaluation"].get("test", {}).get("bits_per_byte"), ".4f"),
                    _number(result["tokens_per_second"], ",.0f"),
                    _number(result["seconds"], ",.0f"),
                ]
            )
        return header, rows

    def to_dict(self) -> dict[str, Any]:
        keys = ("recipe", "seed", "parameters", "steps", "tokens", "seconds", "tokens_per_second")
        more = ("valid_perplexity", "test_perplexity", "test_unigram_perplexity", "commit", "hardware")
        runs = [
            {"run": name, **{key: result.get(key) for key in (*keys, *more)}}
            for name, result in zip(self.names, self.results, strict=True)
        ]
        return {"runs": runs, "warnings": self.warnings}


def compare_runs(folders: Sequence[str | Path]) -> Comparison:
    results = []
    for path in folders:
        folder = RunFolder(path)
        folder.recipe()  # a folder that is no run says so
        if not folder.result.exists():
            raise UserError(
                f"The run in {path} is not finished: go on with `torchdefine train … --out {path} --resume`."
            )
        results.append(folder.read_result())
    return Comparison(_short_names([str(path) for path in folders]), results)


def print_comparison(comparison: Comparison) -> None:
    header, rows = comparison.table()
    print_table(header, rows, _note(comparison))
    for warning in comparison.warnings:
        print(f"Beware: {warning}")


def curve_figure(comparison: Comparison) -> Figure:
    """Validation perplexity against the tokens seen."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, ScalarFormatter
    except ImportError:
        raise UserError("Drawing needs the package matplotlib: pip install 'torchdefine[plot]'.") from None
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, result) in enumerate(zip(comparison.names, comparison.results, strict=True)):
        points = [(p["tokens"], p["perplexity"]) for p in result["curve"]]
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}
        axes.plot(*zip(*points, strict=True), label=name, marker="o", markersize=3.5, **style)  # type: ignore[arg-type]
    if unigram := comparison.results[0].get("valid_unigram_perplexity"):
        axes.axhline(unigram, color="#777777", linewidth=1, linestyle=":", label="unigram")
    axes.set(xlabel="training tokens", ylabel="validation perplexity (log scale)", yscale="log")
    axes.xaxis.set_major_formatter(EngFormatter())
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(ScalarFormatter())
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    return figure


def write_report(comparison: Comparison, path: Path) -> None:
    """One HTML file that opens from disk: the table, the curves, and how the numbers came about."""
    picture = io.StringIO()
    curve_figure(comparison).savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()[picture.getvalue().index("<svg") :]
    first = comparison.results[0]
    facts = {
        "text": f"{first['data']['corpus']}, vocabulary {first['data']['vocabulary_size']:,}",
        "training": f"{first['steps']:,} steps, {first['tokens']:,} tokens",
        "evaluation": first["evaluation"].get("test", {}).get("protocol", "–"),
        "seeds": ", ".join(str(r["seed"]) for r in comparison.results),
        "commit": first["commit"] or "an installed package",
        "hardware": ", ".join(f"{k} {v}" for k, v in first["hardware"].items()),
        "versions": ", ".join(f"{k} {v}" for k, v in first["versions"].items() if v),
    }
    listed = "\n".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
    warnings = "".join(f"<p class=warning>Beware: {html.escape(w)}</p>" for w in comparison.warnings)
    write_text(
        path,
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>torchdefine: a comparison</title>
<style>
:root {{ color-scheme: light; }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1a1a1a; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .3rem .7rem; text-align: left; border-bottom: 1px solid #ddd; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
svg {{ max-width: 100%; height: auto; }}
dt {{ font-weight: 600; }} dd {{ margin: 0 0 .5rem 0; overflow-wrap: anywhere; }}
.warning {{ color: #a33; }}
</style>
</head>
<body>
<h1>Embeddings compared</h1>
<div class="wide" tabindex="0">{html_table(*comparison.table())}</div>
<p>{html.escape(_note(comparison))}</p>
{warnings}
<h2>While they learned</h2>
<figure aria-label="Validation perplexity against training tokens">{svg}</figure>
<h2>How this came about</h2>
<dl>{listed}</dl>
</body>
</html>
""",
    )


def _note(comparison: Comparison) -> str:
    unigram = (
        f" A model that only counts words has a test perplexity of {comparison.unigram:,.1f}."
        if (comparison.unigram)
        else ""
    )
    return f"Unit, context model, tables and total in millions of parameters; * marks the best perplexity.{unigram}"


def _vocabulary(result: dict[str, Any]) -> Any:
    return result["data"]["vocabulary_sha256"]


def _perplexity(value: float | None, best: float) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}{'*' if value == best else ''}"


def _number(value: float | None, shape: str) -> str:
    return "–" if value is None else format(value, shape)


def _short_names(paths: list[str]) -> list[str]:
    """The last part of each path where that tells them apart."""
    last = [Path(path).name for path in paths]
    return last if len(set(last)) == len(last) else paths
