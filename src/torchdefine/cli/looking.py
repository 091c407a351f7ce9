"""Commands that show runs to people."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from torchdefine.cli.shared import Command, add_shared, bar, print_json
from torchdefine.errors import UserError

PICTURES = """  curves      validation perplexity of every run, and that of training as a thin line
  parameters  the parameters of each part, one stacked bar per run
  maps        correlation maps of the finished vectors: standard, projected, DeFINE
  layers      correlation maps of one run with a DeFINE unit, layer by layer and group by group
  groups      mean cosines between the groups of every layer of such a run"""


def add_commands(command: Command) -> None:
    """The commands that show runs."""
    option = command("compare", _compare, "Put runs side by side: parameters, perplexities, speed, what to beware of.")
    add_shared(option, "folders", "--json")

    option = command("report", _report, "Write one HTML file about runs, finished or not; it opens from disk.")
    add_shared(option, "folders")
    option("--out", help="the HTML file (default: report.html in the first run's folder)")
    option("--words", help="words to show the neighbours of, with commas between (default: frequent ones)")
    option("--prompt", default="The", help="the text that the runs continue (default: The)")

    option = command("plot", _plot, "Draw one picture of runs for a paper: PNG, SVG or PDF.", PICTURES)
    option("kind", choices=["curves", "parameters", "maps", "layers", "groups"], help="which picture")
    add_shared(option, "folders")
    option("--out", required=True, help="the file to write, ending in .png, .svg or .pdf")
    axes = ["tokens", "step", "seconds"]
    option("--by", choices=axes, help="the horizontal axis of curves (default: tokens)")
    option("--centred", action="store_true", help="maps of Pearson's correlations instead of the paper's")


def _compare(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.comparison import compare_runs, print_comparison

    comparison = compare_runs(options.folders)
    if options.json:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison)


def _report(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.report import write_report

    path = Path(options.out) if options.out else Path(options.folders[0]) / "report.html"
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"The report is HTML: {path} must end in .html.")
    words = [word.strip() for word in options.words.split(",") if word.strip()] if options.words else None
    with bar("looking at the runs") as progress:
        write_report(options.folders, path, words, options.prompt, progress)
    print(f"The report is in {path}.")


def _plot(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.report import draw

    if options.by is not None and options.kind != "curves":
        raise UserError(f"--by is the horizontal axis of curves, and {options.kind} have none: leave it out.")
    if options.centred and options.kind in ("curves", "parameters"):
        raise UserError(f"--centred is for correlations, and {options.kind} show none: leave it out.")
    out = Path(options.out)
    for sentence in draw(options.kind, options.folders, out, by=options.by or "tokens", centred=options.centred):
        print(sentence, file=sys.stderr)
    print(f"The picture is in {out}.")
