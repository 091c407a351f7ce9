"""Pictures and reports of runs: one self-contained HTML file that opens from disk, or single pictures for a paper."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch

from torchdefine.analysis import correlation, pictures
from torchdefine.analysis.comparison import Comparison, compare_runs
from torchdefine.analysis.correlation import CorrelationMap, embedding_maps
from torchdefine.analysis.fairness import NO_SUCH_SETTING, differing_settings
from torchdefine.analysis.neighbours import frequent_words, nearest_neighbours
from torchdefine.analysis.run_summary import RunSummary, instead_of_the_best, summarise
from torchdefine.analysis.tables import html_table
from torchdefine.errors import UserError
from torchdefine.files import Meter, Progress, write_text
from torchdefine.plain import escaped
from torchdefine.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

RANK_EXPLAINED = (
    "The effective rank is the number of independent dimensions that carry as much information. It is the number of "
    "all dimensions if they are independent, and 1 if all are copies of one. The columns above 0.1, 0.25 and 0.5 give "
    "the fraction of pairs of dimensions whose absolute cosine is larger."
)
GROUPS_EXPLAINED = (
    "Each entry is the mean absolute cosine between the dimensions of two groups, and on the diagonal within a group. "
    "It is 0 if the groups have learned independent features."
)
MAPS_EXPLAINED = (
    "<p>Entry (i, j) is the absolute cosine between dimensions i and j of the token vectors over the whole "
    "vocabulary: 1 on the diagonal, 0 if two dimensions are independent. The numbers below each map are the mean of "
    "all entries off the diagonal, and the effective rank.</p>"
)
SAMPLE_LENGTH, SAMPLE_SEED = 40, 1
NO_WEIGHTS = "<p>No run has readable weights.</p>"
NO_TABLE = "is left out: bigrams go through its unit, so a token has no vector of its own."


def draw(
    kind: str, folders: Sequence[str | Path], path: Path, *, by: pictures.Axis = "tokens", centred: bool = False
) -> list[str]:
    """Draw one kind of picture of the runs into a file; ``by`` is for curves and ``centred`` for maps.

    Gives a sentence for every run that could not be drawn.
    """
    runs = summarise(folders)
    if kind in ("curves", "parameters"):
        figure = pictures.curve_figure(runs, by) if kind == "curves" else pictures.parameter_figure(runs)
    else:
        figure = _map_figure(kind, runs, centred)
    pictures.save_figure(figure, path)
    return pictures.undrawn_curves(runs) if kind == "curves" else []


def _map_figure(kind: str, runs: list[RunSummary], centred: bool) -> Figure:
    if kind != "maps" and len(runs) != 1:
        raise UserError(f"The picture {kind!r} is of one run, but {len(runs)} were given: draw one after another.")
    maps = {}
    for summary in runs:
        run = summary.open()
        if run is None:
            raise UserError(f"The run in {summary.folder.path} has written no weights that can be read.")
        if note := instead_of_the_best(run):
            log.warning(note)
        maps[summary.name] = embedding_maps(run.embedding, centred=centred)
    if kind == "maps":
        return pictures.maps_figure(correlation.layout_rows(runs, _finished(maps)))
    ((name, stages),) = maps.items()
    if kind == "groups":
        return pictures.groups_figure(list(stages.values()))
    if "layer 1" not in stages:
        raise UserError(f"The run {name} has no DeFINE unit, so it has no layers to draw: use the kind maps.")
    return pictures.maps_figure(correlation.layer_rows(stages))


def _finished(maps: dict[str, dict[str, CorrelationMap]]) -> dict[str, CorrelationMap]:
    """The maps of the finished vectors, called like their runs."""
    return {name: CorrelationMap(name, stages["finished"].cosines) for name, stages in maps.items()}


def write_report(
    folders: Sequence[str | Path],
    path: Path,
    words: Sequence[str] | None = None,
    prompt: str = "The",
    progress: Progress | None = None,
) -> None:
    """Write the report of one or more runs; what a run does not have yet is said, not left out in silence.

    It shows the neighbours of ``words``, by default of frequent ones of each run's own vocabulary, and how the models
    continue ``prompt``.
    """
    comparison = compare_runs(folders)
    runs = comparison.runs
    meter = Meter(2 * len(runs), progress)
    opened: dict[str, Run] = {}
    for summary in runs:
        if (run := summary.open()) is not None:
            opened[summary.name] = run
        meter.advance(1)
    maps = {}
    tabled = {name: run for name, run in opened.items() if run.embedding.has_table}
    for name, run in tabled.items():
        maps[name] = embedding_maps(run.embedding)
        meter.advance(1)
    meter.finish()
    sections = {
        "Result": _result_section(comparison, filter(None, map(instead_of_the_best, opened.values()))),
        "Parameters": _parameter_section(runs),
        "Training curves": _curve_section(runs),
        "Correlation maps": _map_section(runs, maps, [name for name in opened if name not in tabled]),
        "Samples": _sample_section(opened, prompt),
        "Nearest neighbours": _neighbour_section(tabled, words),
        "Settings": _settings_section(runs),
        "Origin": "".join(map(_origin, runs)),
    }
    write_text(path, _page(runs, sections))


def _result_section(comparison: Comparison, notes: Iterable[str]) -> str:
    warnings = "".join(f'<p class="warning">{escaped(w)}</p>' for w in (*comparison.warnings, *notes))
    return f"{_table(comparison.columns, comparison.rows())}{_paragraph(comparison.note)}{warnings}"


def _parameter_section(runs: list[RunSummary]) -> str:
    if not any(run.parameters for run in runs):
        return "<p>No run has counted its parameters yet.</p>"
    return _picture(pictures.parameter_figure(runs), "Parameters of every run by part")


def _curve_section(runs: list[RunSummary]) -> str:
    """Three axes behind radio buttons: no script, and a keyboard reaches them."""
    if not any(run.valid or run.train for run in runs):
        return "<p>Nothing has been logged yet.</p>"
    buttons: list[str] = []
    panels = []
    for axis, name in pictures.AXIS_NAMES.items():
        checked = "" if buttons else " checked"
        button = f'<input type="radio" name="axis" id="by-{axis}"{checked}>'
        buttons.append(f'{button}<label for="by-{axis}">by {name}</label>')
        picture = _picture(pictures.curve_figure(runs, axis), f"Perplexity by {name}")
        panels.append(f'<div class="panel by-{axis}">{picture}</div>')
    points = sum(len(run.valid) for run in runs)
    few = "<p>There is only one validation so far.</p>" if points == 1 else ""
    return f'<div class="tabs">{"".join(buttons)}{"".join(panels)}</div>{few}'


def _map_section(runs: list[RunSummary], maps: dict[str, dict[str, CorrelationMap]], without: Sequence[str]) -> str:
    left_out = "".join(f"<p>{escaped(name)} {NO_TABLE}</p>" for name in without)
    if not maps:
        return left_out or NO_WEIGHTS
    finished = _finished(maps)
    rows = correlation.layout_rows([run for run in runs if run.name in finished], finished)
    reference = correlation.standard_table(runs, finished)
    explained = RANK_EXPLAINED
    if reference is not None:
        explained += (
            f" The distance to {reference.name} is the mean absolute difference between the entries of the two maps, 0 "
            "for equal maps."
        )
    parts = [
        MAPS_EXPLAINED,
        left_out,
        _maps(rows),
        _table(*correlation.numbers_table(finished.values(), reference)),
        _paragraph(explained),
    ]
    for name, stages in maps.items():
        if any(stage.groups > 1 for stage in stages.values()):
            groups = "".join(
                _picture(pictures.groups_figure([stage]), f"Cosines between the groups of {name}, {stage.name}")
                for stage in stages.values()
                if stage.groups > 1
            )
            layers, numbers = correlation.layer_rows(stages), _table(*correlation.numbers_table(stages.values()))
            parts.append(
                f"<details><summary>{escaped(name)}, layer by layer</summary>{_maps(layers)}{numbers}"
                f"<h3>Between the groups of a layer</h3><p>{GROUPS_EXPLAINED}</p>"
                f'<div class="groups">{groups}</div></details>'
            )
    return "".join(parts)


def _sample_section(opened: dict[str, Run], prompt: str) -> str:
    """What each run writes; a sentence that several have before it is said once."""
    parts, leads = [] if opened else [NO_WEIGHTS], {""}
    for name, run in opened.items():
        sample = run.sample(prompt, SAMPLE_LENGTH, SAMPLE_SEED)
        if sample is None:
            continue
        if sample.lead not in leads:
            leads.add(sample.lead)
            parts.append(_paragraph(sample.lead))
        text = f"<blockquote>{escaped(sample.text)}</blockquote>" if sample.text else ""
        table = "" if sample.table is None else _table(*sample.table)
        parts.append(f"<h3>{escaped(name)}</h3>{_paragraph(sample.note)}{text}{table}")
    return "".join(parts)


def _neighbour_section(opened: dict[str, Run], chosen: Sequence[str] | None) -> str:
    lead = "Words with similar vectors. Vectors of the same direction have a cosine of 1, orthogonal vectors 0."
    if not chosen:
        lead += " The words are frequent words of each run's vocabulary; choose others with --words."
    parts = [_paragraph(lead)] if opened else ["<p>No run has a readable vector for each token.</p>"]
    for name, run in opened.items():
        if (tokens := run.names_of_tokens) is None:
            continue
        words = chosen or frequent_words(tokens)
        found = nearest_neighbours(run.embedding.table(), tokens, words)
        rows = [[word, ", ".join(f"{other} {cosine:.2f}" for other, cosine in near)] for word, near in found.items()]
        table = _table(["word", "nearest by cosine"], rows) if rows else ""
        without = ", ".join(word for word in words if word not in found)
        note = f"Not in the vocabulary: {without}." if without else ""
        note = note if words else "No word is frequent enough."
        parts.append(f"<h3>{escaped(name)}</h3>{table}{_paragraph(note)}")
    return "".join(parts)


def _settings_section(runs: list[RunSummary]) -> str:
    """Where the recipes differ, first; the whole recipes below."""
    rows, lead, table = differing_settings([run.recipe for run in runs]), "The runs have the same settings.", ""
    if rows:
        lead = f"Settings that differ ({NO_SUCH_SETTING}: the run has no such setting):"
        table = _table(["setting", *(run.name for run in runs)], rows)
    whole = "".join(
        f"<details><summary>{escaped(run.name)}: the whole recipe</summary>"
        f"<pre tabindex='0'>{escaped(run.recipe.to_yaml())}</pre></details>"
        for run in runs
    )
    return f"{_paragraph(lead if len(runs) > 1 else '')}{table}{whole}"


def _origin(run: RunSummary) -> str:
    data = run.fact("data") or {}
    facts: dict[str, Any] = {
        "seed": run.recipe.train.seed,
        "text": f"{data['corpus']}, {data['vocabulary_size']:,} tokens in the vocabulary" if data else None,
        "evaluation": run.evaluation("test").get("protocol"),
        "commit": run.fact("commit") or "an installed package",
    }
    for name in ("hardware", "versions"):
        facts[name] = ", ".join(f"{k} {v}" for k, v in (run.fact(name) or {}).items() if v is not None) or None
    items = "".join(f"<dt>{k}</dt><dd>{escaped(str(v))}</dd>" for k, v in facts.items() if v is not None)
    return f"<h3>{escaped(run.name)}</h3><dl>{items}</dl>"


def _paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>" if text else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself where the page is too narrow for it."""
    return f'<div class="wide" tabindex="0">{html_table(header, rows)}</div>'


def _picture(figure: Figure, description: str) -> str:
    return f'<figure tabindex="0">{pictures.inline_svg(figure, description)}</figure>'


def _maps(rows: correlation.Rows) -> str:
    """Pictures side by side, as many as fit, with their words below them: a phone has room for two."""
    found = []
    for title, maps in rows:
        for one in maps:
            name = one.name if one.name.startswith(title) else f"{title}: {one.name}"
            numbers = pictures.map_numbers(one)
            found.append(
                f'<figure><img src="{pictures.map_image(one.values)}" alt="Correlation map of {escaped(name)}">'
                f"<figcaption>{escaped(name)}<br>{numbers}</figcaption></figure>"
            )
    scale = pictures.map_image(torch.linspace(0, 1, 64)[None])
    return f'<div class="maps">{"".join(found)}</div><p class="scale">0 <img src="{scale}" alt="to"> 1</p>'


def _page(runs: list[RunSummary], sections: dict[str, str]) -> str:
    anchors = body = recipes = ""
    for index, (title, content) in enumerate(sections.items()):
        anchors += f'<li><a href="#part-{index}">{escaped(title)}</a></li>'
        body += f'<section id="part-{index}"><h2>{escaped(title)}</h2>{content}</section>'
    for run in runs:
        recipe = ": ".join(filter(None, (run.recipe.name, run.recipe.description)))
        recipes += f"<dt>{escaped(run.name)}</dt><dd>{escaped(recipe)}</dd>"
    title = escaped(", ".join(run.name for run in runs))
    page = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return page.substitute(title=title, recipes=recipes, anchors=anchors, body=body)
