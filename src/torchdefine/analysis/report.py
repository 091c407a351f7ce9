"""One self-contained HTML file about runs: opens from disk, needs no network, follows a light or a dark theme."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdefine.analysis.comparison import Comparison
from torchdefine.analysis.correlation import CorrelationMap, embedding_maps
from torchdefine.analysis.neighbours import nearest_neighbours
from torchdefine.analysis.pictures import (
    AXIS_NAMES,
    curve_figure,
    groups_figure,
    inline_svg,
    maps_figure,
    parameter_figure,
)
from torchdefine.analysis.run_summary import RunSummary, summarise
from torchdefine.analysis.tables import html_table
from torchdefine.files import Progress, write_text
from torchdefine.run import Run
from torchdefine.settings import to_plain

WORDS = ("river", "music", "football", "president", "two", "1990", "said", "large", "London", "she")
"""Neighbours are shown of those that the vocabulary has, unless others are asked for."""
WIDEST_LAYER_SHOWN = 512
"""Maps of wider layers are shown group by group only; the page would grow by megabytes otherwise."""


@dataclass(frozen=True)
class ReportOptions:
    """What a reader may choose."""

    words: Sequence[str] = WORDS
    prompt: str = "The"
    length: int = 40
    seed: int = 1


def write_report(
    folders: Sequence[str | Path], path: Path, options: ReportOptions | None = None, progress: Progress | None = None
) -> None:
    """Write the report of one or more runs; what a run does not have yet is said, not left out in silence."""
    options = options or ReportOptions()
    comparison = Comparison(summarise(folders))
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
        ("Result", _result_section(comparison)),
        ("Parameters", _parameter_section(comparison.runs)),
        ("While they learned", _curve_section(comparison.runs)),
        ("Correlation maps", _map_section(comparison.runs, maps)),
        ("What they write", _sample_section(opened, options)),
        ("Nearest neighbours", _neighbour_section(opened, options)),
        ("Settings", _settings_section(comparison.runs)),
        ("How this came about", _origin_section(comparison.runs)),
    ]
    write_text(path, _page([run.name for run in comparison.runs], sections))


def _result_section(comparison: Comparison) -> str:
    warnings = "".join(f'<p class="warning">{html.escape(w)}</p>' for w in comparison.warnings)
    return f"{_wide(html_table(comparison.columns, comparison.rows()))}<p>{html.escape(comparison.note)}</p>{warnings}"


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
        return "<p>No run has written weights that can be read, so there is nothing to look at.</p>"
    finished = {name: CorrelationMap(name, stages["finished"].cosines) for name, stages in maps.items()}
    rows = layout_rows([run for run in runs if run.name in finished], finished)
    parts = [
        "<p>Entry (i, j) is the absolute cosine between dimensions i and j of the finished vectors over the whole "
        "vocabulary: 1 on the diagonal, 0 where two dimensions are independent.</p>",
        _figure(inline_svg(maps_figure(rows), "Correlation maps of the finished vectors")),
        _wide(html_table(*numbers_table(list(finished.values()), _reference(runs, finished)))),
    ]
    for name, stages in maps.items():
        if any(stage.groups > 1 for stage in stages.values()):
            layers = inline_svg(maps_figure(layer_rows(stages)), f"Correlation maps of {name}, layer by layer")
            groups = inline_svg(groups_figure(list(stages.values())), f"Cosines between the groups of {name}")
            table = html_table(*numbers_table(list(stages.values())))
            parts.append(
                f"<details><summary>{html.escape(name)}, layer by layer</summary>"
                f"{_figure(layers)}{_wide(table)}<h3>Between the groups of a layer</h3>{_figure(groups)}</details>"
            )
    return "".join(parts)


def layout_rows(runs: list[RunSummary], finished: dict[str, CorrelationMap]) -> list[tuple[str, list[CorrelationMap]]]:
    """The paper's layout: standard tables, then projected ones, then DeFINE, each by the width of its table."""
    kinds: dict[str, list[RunSummary]] = {"Standard": [], "Projected": [], "DeFINE": []}
    for run in runs:
        settings = run.recipe.embedding
        projected = settings.unit in ("projection", "mlp") or settings.map == "projective"
        kind = "Projected" if projected else "Standard" if settings.unit == "none" else "DeFINE"
        kinds[kind].append(run)
    return [
        (kind, [finished[run.name] for run in sorted(members, key=lambda r: r.recipe.embedding.map_dim)])
        for kind, members in kinds.items()
        if members
    ]


def layer_rows(stages: dict[str, CorrelationMap]) -> list[tuple[str, list[CorrelationMap]]]:
    """The paper's layer-wise layout: the map, every expansion layer group by group, the finished vectors."""
    rows = []
    for name, stage in stages.items():
        if stage.groups > 1:
            rows.append((name, [stage.group(index) for index in range(min(stage.groups, 4))]))
        elif len(stage.cosines) <= WIDEST_LAYER_SHOWN:
            rows.append((name, [stage]))
    return rows


def numbers_table(
    maps: Sequence[CorrelationMap], reference: CorrelationMap | None = None
) -> tuple[list[str], list[list[str]]]:
    """What the pictures show, in numbers."""
    header = ["map", "dimensions", "mean |cosine|", "above 0.1", "above 0.25", "above 0.5", "effective rank"]
    rows = []
    for correlation in maps:
        numbers = correlation.numbers()
        shares = [f"{numbers[f'share_above_{t}']:.1%}" for t in (0.1, 0.25, 0.5)]
        row = [correlation.name, str(numbers["dimensions"]), f"{numbers['mean_off_diagonal']:.4f}", *shares]
        rows.append([*row, f"{numbers['effective_rank']:.1f}"])
    if reference is not None:
        header.append(f"distance to {reference.name}")
        for row, correlation in zip(rows, maps, strict=True):
            same = correlation.cosines.shape == reference.cosines.shape
            row.append(f"{correlation.distance(reference):.4f}" if same else "–")
    return header, rows


def _reference(runs: list[RunSummary], finished: dict[str, CorrelationMap]) -> CorrelationMap | None:
    """The standard table that the other maps are compared with, if there is one."""
    for run in runs:
        if run.name in finished and run.recipe.embedding.unit == "none" and run.recipe.embedding.map == "standard":
            return finished[run.name]
    return None


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
        shown = html.escape(f"{options.prompt} {text}".strip())
        parts.append(f"<h3>{html.escape(summary.name)}</h3><blockquote>{shown}</blockquote>")
    return "".join(parts)


def _translations(summary: RunSummary) -> str:
    """Sentences of the test text as the finished run translates them."""
    shown = summary.fact("translations") or []
    if not shown:
        return "<p>The run has not translated a test text yet.</p>"
    rows = [[item["source"], item["translation"], item["reference"]] for item in shown]
    return _wide(html_table(["source", "translation", "reference"], rows))


def _neighbour_section(opened: list[tuple[RunSummary, Run]], options: ReportOptions) -> str:
    parts = []
    for summary, run in opened:
        tokens, words = run.tokenization, options.words
        if run.recipe.task == "translation":  # its subwords carry the space before a word
            tokens, words = run.tokenization.target, [f"Ġ{word}" for word in words]
        found = nearest_neighbours(run.embedding.table(), tokens, words)
        rows = [[word, ", ".join(f"{other} {cosine:.2f}" for other, cosine in near)] for word, near in found.items()]
        table = _wide(html_table(["word", "nearest by cosine"], rows)) if rows else "<p>None of the words is known.</p>"
        parts.append(f"<h3>{html.escape(summary.name)}</h3>{table}")
    return "".join(parts) or "<p>No run has written weights that can be read.</p>"


def _settings_section(runs: list[RunSummary]) -> str:
    """Where the recipes differ, first; the whole recipes below."""
    flat = [_flatten(to_plain(run.recipe)) for run in runs]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    hidden = ("name", "description")
    differing = [n for n in names if n not in hidden and any(s.get(n) != flat[0].get(n) for s in flat)]
    rows = [[name, *(str(settings.get(name, "–")) for settings in flat)] for name in differing]
    table = _wide(html_table(["setting", *(run.name for run in runs)], rows)) if rows else ""
    lead = "<p>Settings in which the runs differ:</p>" if rows else "<p>The runs have the same settings.</p>"
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
            "recipe": run.recipe.name,
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


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _figure(svg: str) -> str:
    return f'<figure tabindex="0">{svg}</figure>'


def _wide(table: str) -> str:
    return f'<div class="wide" tabindex="0">{table}</div>'


def _page(names: list[str], sections: list[tuple[str, str]]) -> str:
    anchors = "".join(f'<li><a href="#part-{i}">{html.escape(title)}</a></li>' for i, (title, _) in enumerate(sections))
    body = "".join(
        f'<section id="part-{i}"><h2>{html.escape(title)}</h2>{content}</section>'
        for i, (title, content) in enumerate(sections)
    )
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    title = html.escape(", ".join(names))
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
<header><h1>{title}</h1><nav aria-label="Sections"><ul>{anchors}</ul></nav></header>
<main>{body}</main>
</body>
</html>
"""
