"""One self-contained HTML file about runs: opens from disk, needs no network, follows a light or a dark theme."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdefine.analysis.comparison import Comparison, compare_runs
from torchdefine.analysis.correlation import CorrelationMap, embedding_maps
from torchdefine.analysis.fairness import NO_SUCH_SETTING, differing_settings
from torchdefine.analysis.maps import layer_rows, layout_rows, numbers_table, standard_table
from torchdefine.analysis.neighbours import frequent_words, nearest_neighbours
from torchdefine.analysis.pictures import (
    AXIS_NAMES,
    curve_figure,
    groups_figure,
    inline_svg,
    maps_figure,
    parameter_figure,
)
from torchdefine.analysis.run_summary import RunSummary, instead_of_the_best
from torchdefine.analysis.tables import html_table
from torchdefine.files import Progress, write_text
from torchdefine.run import Run

RANK_EXPLAINED = (
    "The effective rank says how many independent dimensions would be as rich as these: all of them where every "
    "dimension is independent of the others, 1 where all are copies of one. Above 0.1, 0.25 and 0.5 is the fraction of "
    "pairs of dimensions with a larger absolute cosine."
)
GROUPS_EXPLAINED = (
    "Each entry is the mean absolute cosine between the dimensions of two groups, and on the diagonal within one: 0 "
    "where groups have learned independent things."
)
NO_WEIGHTS = "<p>No run has written weights that can be read.</p>"


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
        ("Correlation maps", _map_section(comparison.runs, maps)),
        ("What they write", _sample_section(opened, options)),
        ("Nearest neighbours", _neighbour_section(opened, options)),
        ("Settings", _settings_section(comparison.runs)),
        ("How this came about", _origin_section(comparison.runs)),
    ]
    write_text(path, _page(comparison.runs, sections))


def _result_section(comparison: Comparison, notes: Sequence[str]) -> str:
    warnings = "".join(f'<p class="warning">{html.escape(w)}</p>' for w in (*comparison.warnings, *notes))
    return f"{_wide(html_table(comparison.columns, comparison.rows()))}{_paragraph(comparison.note)}{warnings}"


def _parameter_section(runs: list[RunSummary]) -> str:
    if not any(run.parameters for run in runs):
        return "<p>No run has counted its parameters yet.</p>"
    return _figure(inline_svg(parameter_figure(runs), "Parameters of every run by part"))


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
        panels.append(f'<div class="panel by-{axis}">{_figure(picture)}</div>')
    points = sum(len(run.valid) for run in runs)
    few = "<p>A single validation so far: a point, not yet a curve.</p>" if points == 1 else ""
    return f'<div class="tabs">{"".join(buttons)}{"".join(panels)}</div>{few}'


def _map_section(runs: list[RunSummary], maps: dict[str, dict[str, CorrelationMap]]) -> str:
    if not maps:
        return NO_WEIGHTS
    finished = {name: CorrelationMap(name, stages["finished"].cosines) for name, stages in maps.items()}
    rows = layout_rows([run for run in runs if run.name in finished], finished)
    reference = standard_table(runs, finished)
    explained = RANK_EXPLAINED
    if reference is not None:
        explained += (
            f" The distance to {reference.name} is the mean difference between the two maps, entry by entry: 0 for "
            "equal maps."
        )
    parts = [
        "<p>Entry (i, j) is the absolute cosine between dimensions i and j of the finished vectors over the whole "
        "vocabulary: 1 on the diagonal, 0 where two dimensions are independent. Under every map stand the mean of all "
        "entries off the diagonal, and its effective rank.</p>",
        _figure(inline_svg(maps_figure(rows), "Correlation maps of the finished vectors")),
        _wide(html_table(*numbers_table(list(finished.values()), reference))),
        _paragraph(explained),
    ]
    for name, stages in maps.items():
        if any(stage.groups > 1 for stage in stages.values()):
            layers = inline_svg(maps_figure(layer_rows(stages)), f"Correlation maps of {name}, layer by layer")
            groups = inline_svg(groups_figure(list(stages.values())), f"Cosines between the groups of {name}")
            table = html_table(*numbers_table(list(stages.values())))
            parts.append(
                f"<details><summary>{html.escape(name)}, layer by layer</summary>"
                f"{_figure(layers)}{_wide(table)}<h3>Between the groups of a layer</h3>"
                f"<p>{GROUPS_EXPLAINED}</p>{_figure(groups)}</details>"
            )
    return "".join(parts)


def _sample_section(opened: list[tuple[RunSummary, Run]], options: ReportOptions) -> str:
    """What each run writes; a sentence that several have before it is said once."""
    parts, leads = [] if opened else [NO_WEIGHTS], {""}
    for summary, run in opened:
        sample = run.sample(options.prompt, options.length, options.seed)
        if sample is None:
            continue
        if sample.lead not in leads:
            leads.add(sample.lead)
            parts.append(_paragraph(sample.lead))
        parts += [f"<h3>{html.escape(summary.name)}</h3>", _paragraph(sample.note)]
        if sample.text:
            parts.append(f"<blockquote>{html.escape(sample.text)}</blockquote>")
        if sample.table is not None:
            parts.append(_wide(html_table(*sample.table)))
    return "".join(parts)


def _neighbour_section(opened: list[tuple[RunSummary, Run]], options: ReportOptions) -> str:
    lead = "Words whose finished vectors point the same way: 1 is the same direction, 0 a right angle."
    if not options.words:
        lead += " The words are frequent ones of each run's own vocabulary; --words chooses others."
    parts = [_paragraph(lead)] if opened else [NO_WEIGHTS]
    for summary, run in opened:
        if (tokens := run.names_of_tokens) is None:
            continue
        words = options.words or frequent_words(tokens)
        found = nearest_neighbours(run.embedding.table(), tokens, words)
        rows = [[word, ", ".join(f"{other} {cosine:.2f}" for other, cosine in near)] for word, near in found.items()]
        table = _wide(html_table(["word", "nearest by cosine"], rows)) if rows else ""
        without = ", ".join(word for word in words if word not in found)
        note = f"No token of its vocabulary, so without neighbours: {without}." if without else ""
        if not words:
            note = "No word was seen often enough."
        parts.append(f"<h3>{html.escape(summary.name)}</h3>{table}{_paragraph(note)}")
    return "".join(parts)


def _settings_section(runs: list[RunSummary]) -> str:
    """Where the recipes differ, first; the whole recipes below."""
    rows = differing_settings([run.recipe for run in runs])
    table = _wide(html_table(["setting", *(run.name for run in runs)], rows)) if rows else ""
    lead = "<p>The runs have the same settings.</p>"
    if rows:
        lead = f"<p>Settings in which the runs differ; {NO_SUCH_SETTING} where one has none:</p>"
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


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>" if text else ""


def _wide(table: str) -> str:
    """A table that scrolls by itself where the page is too narrow for it."""
    return f'<div class="wide" tabindex="0">{table}</div>'


def _figure(svg: str) -> str:
    return f'<figure tabindex="0">{svg}</figure>'


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
