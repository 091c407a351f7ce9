"""One self-contained HTML file about runs: opens from disk, needs no network, follows a light or a dark theme."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdefine.analysis.comparison import Comparison, compare_runs
from torchdefine.analysis.correlation import embedding_maps
from torchdefine.analysis.neighbours import frequent_words, nearest_neighbours
from torchdefine.analysis.pictures import AXIS_NAMES, curve_figure, inline_svg, parameter_figure
from torchdefine.analysis.report_maps import map_section
from torchdefine.analysis.run_summary import RunSummary, instead_of_the_best
from torchdefine.analysis.settings_table import NO_EFFECT, differing_settings
from torchdefine.analysis.tables import figure, html_table, wide
from torchdefine.files import Progress, write_text
from torchdefine.run import Run


@dataclass(frozen=True)
class ReportOptions:
    """What a reader may choose."""

    words: Sequence[str] | None = None
    """To show the neighbours of; frequent ones of each run's own vocabulary by default."""
    prompt: str = "The"
    length: int = 40
    seed: int = 1


def write_report(
    folders: Sequence[str | Path], path: Path, options: ReportOptions | None = None, progress: Progress | None = None
) -> None:
    """Write the report of one or more runs; what a run does not have yet is said, not left out in silence."""
    options = options or ReportOptions()
    comparison = compare_runs(folders)
    opened: list[tuple[RunSummary, Run]] = []
    for done, summary in enumerate(comparison.runs, start=1):
        run = summary.open()
        if run is not None:
            opened.append((summary, run))
        if progress:
            progress(done, 2 * len(comparison.runs))
    maps = {}
    for done, (summary, run) in enumerate(opened, start=1):
        maps[summary.name] = embedding_maps(run.embedding)
        if progress:
            progress(len(comparison.runs) + done, len(comparison.runs) + len(opened))
    sections = [
        ("Result", _result_section(comparison, [note for _, run in opened if (note := instead_of_the_best(run))])),
        ("Parameters", _parameter_section(comparison.runs)),
        ("While they learned", _curve_section(comparison.runs)),
        ("Correlation maps", map_section(comparison.runs, maps)),
        ("What they write", _sample_section(opened, options)),
        ("Nearest neighbours", _neighbour_section(opened, options)),
        ("Settings", _settings_section(comparison.runs)),
        ("How this came about", _origin_section(comparison.runs)),
    ]
    write_text(path, _page(comparison.runs, sections))


def _result_section(comparison: Comparison, notes: Sequence[str]) -> str:
    warnings = "".join(f'<p class="warning">{html.escape(w)}</p>' for w in (*comparison.warnings, *notes))
    return f"{wide(html_table(comparison.columns, comparison.rows()))}<p>{html.escape(comparison.note)}</p>{warnings}"


def _parameter_section(runs: list[RunSummary]) -> str:
    if not any(run.parameters for run in runs):
        return "<p>No run has counted its parameters yet.</p>"
    return figure(inline_svg(parameter_figure(runs), "Parameters of every run by part"))


def _curve_section(runs: list[RunSummary]) -> str:
    """Three axes behind radio buttons: no script, and a keyboard reaches them."""
    if not any(run.valid or run.train for run in runs):
        return "<p>Nothing has been logged yet.</p>"
    buttons, panels = [], []
    for number, (axis, name) in enumerate(AXIS_NAMES.items()):
        checked = " checked" if number == 0 else ""
        buttons.append(
            f'<input type="radio" name="axis" id="by-{axis}"{checked}><label for="by-{axis}">by {name}</label>'
        )
        picture = inline_svg(curve_figure(runs, axis), f"Perplexity by {name}")
        panels.append(f'<div class="panel by-{axis}">{figure(picture)}</div>')
    points = sum(len(run.valid) for run in runs)
    few = "<p>A single validation so far: a point, not yet a curve.</p>" if points == 1 else ""
    return f'<div class="tabs">{"".join(buttons)}{"".join(panels)}</div>{few}'


def _sample_section(opened: list[tuple[RunSummary, Run]], options: ReportOptions) -> str:
    if not opened:
        return "<p>No run has written weights that can be read.</p>"
    parts = []
    if any(run.recipe.task == "language" for _, run in opened):
        parts.append(f"<p>Continuations of “{html.escape(options.prompt)}”, drawn with seed {options.seed}.</p>")
    for summary, run in opened:
        if run.recipe.task == "translation":
            parts.append(f"<h3>{html.escape(summary.name)}</h3>{_translations(summary)}")
            continue
        text = run.generate(options.prompt, options.length, seed=options.seed)
        between = " " if run.tokenization.kind == "words" else ""
        shown = html.escape(f"{options.prompt}{between}{text}".strip())
        outside = ", ".join(run.unknown_words(options.prompt))
        note = f"<p>Outside its vocabulary, so read as &lt;unk&gt;: {html.escape(outside)}.</p>" if outside else ""
        parts.append(f"<h3>{html.escape(summary.name)}</h3>{note}<blockquote>{shown}</blockquote>")
    return "".join(parts)


def _translations(summary: RunSummary) -> str:
    """Sentences of the test text as the finished run translates them."""
    shown = summary.fact("translations") or []
    if not shown:
        return "<p>The run has not translated a test text yet.</p>"
    rows = [[item["source"], item["translation"], item["reference"]] for item in shown]
    return wide(html_table(["source", "translation", "reference"], rows))


def _neighbour_section(opened: list[tuple[RunSummary, Run]], options: ReportOptions) -> str:
    if not opened:
        return "<p>No run has written weights that can be read.</p>"
    lead = "Words whose finished vectors point the same way: 1 is the same direction, 0 a right angle."
    if not options.words:
        lead += " The words are frequent ones of each run's own vocabulary; --words chooses others."
    parts = [f"<p>{lead}</p>"]
    for summary, run in opened:
        tokens = run.tokenization.target if run.recipe.task == "translation" else run.tokenization
        words = options.words or frequent_words(tokens)
        found = nearest_neighbours(run.embedding.table(), tokens, words)
        rows = [[word, ", ".join(f"{other} {cosine:.2f}" for other, cosine in near)] for word, near in found.items()]
        table = wide(html_table(["word", "nearest by cosine"], rows)) if rows else ""
        without = ", ".join(word for word in words if word not in found)
        note = f"No token of its vocabulary, so without neighbours: {without}." if without else ""
        if not words:
            note = "No word was seen often enough."
        parts.append(f"<h3>{html.escape(summary.name)}</h3>{table}{f'<p>{html.escape(note)}</p>' if note else ''}")
    return "".join(parts)


def _settings_section(runs: list[RunSummary]) -> str:
    """Where the recipes differ, first; the whole recipes below."""
    rows = differing_settings([run.recipe for run in runs])
    table = wide(html_table(["setting", *(run.name for run in runs)], rows)) if rows else ""
    lead = "<p>The runs have the same settings.</p>"
    if rows:
        lead = f"<p>Settings in which the runs differ; {NO_EFFECT} where one has no effect:</p>"
    if len(runs) == 1:
        lead = ""
    whole = "".join(
        f"<details><summary>{html.escape(run.name)}: the whole recipe</summary>"
        f"<pre tabindex='0'>{html.escape(run.recipe.to_yaml())}</pre></details>"
        for run in runs
    )
    return f"{lead}{table}{whole}"


def _origin_section(runs: list[RunSummary]) -> str:
    parts = []
    for run in runs:
        data = run.fact("data") or {}
        evaluation = (run.fact("evaluation") or {}).get("test", {})
        facts: dict[str, Any] = {
            "seed": run.recipe.train.seed,
            "text": f"{data['corpus']}, {data['vocabulary_size']:,} tokens in the vocabulary" if data else None,
            "evaluation": evaluation.get("protocol"),
            "commit": run.fact("commit") or "an installed package",
            "hardware": _listed(run.fact("hardware")),
            "versions": _listed(run.fact("versions")),
        }
        items = "".join(f"<dt>{k}</dt><dd>{html.escape(str(v))}</dd>" for k, v in facts.items() if v is not None)
        parts.append(f"<h3>{html.escape(run.name)}</h3><dl>{items}</dl>")
    return "".join(parts)


def _listed(values: dict[str, Any] | None) -> str | None:
    return ", ".join(f"{k} {v}" for k, v in values.items() if v is not None) if values else None


def _recipe_of(run: RunSummary) -> str:
    """The name of a run's recipe, with what it is."""
    return ": ".join(part for part in (run.recipe.name, run.recipe.description) if part)


def _page(runs: list[RunSummary], sections: list[tuple[str, str]]) -> str:
    anchors = "".join(f'<li><a href="#part-{i}">{html.escape(title)}</a></li>' for i, (title, _) in enumerate(sections))
    body = "".join(
        f'<section id="part-{i}"><h2>{html.escape(title)}</h2>{content}</section>'
        for i, (title, content) in enumerate(sections)
    )
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    title = html.escape(", ".join(run.name for run in runs))
    recipes = "".join(f"<dt>{html.escape(run.name)}</dt><dd>{html.escape(_recipe_of(run))}</dd>" for run in runs)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>torchdefine: {title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><dl>{recipes}</dl><nav aria-label="Sections"><ul>{anchors}</ul></nav></header>
<main>{body}</main>
</body>
</html>
"""
