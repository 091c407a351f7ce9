"""Correlation maps in a report: pictures, the numbers behind them, and what they mean."""

from __future__ import annotations

import html
from collections.abc import Sequence

from torchdefine.analysis.correlation import CorrelationMap
from torchdefine.analysis.pictures import groups_figure, inline_svg, maps_figure
from torchdefine.analysis.run_summary import RunSummary
from torchdefine.analysis.tables import figure, html_table, wide

WIDEST_LAYER_SHOWN = 512
"""Maps of wider layers are shown group by group only; the page would grow by megabytes otherwise."""
RANK_EXPLAINED = (
    "The effective rank says how many independent dimensions would be as rich as these: all of them where every "
    "dimension is independent of the others, 1 where all are copies of one. Above 0.1, 0.25 and 0.5 is the share of "
    "pairs of dimensions with a larger absolute cosine."
)
GROUPS_EXPLAINED = (
    "Each entry is the mean absolute cosine between the dimensions of two groups, and on the diagonal within one: 0 "
    "where groups have learned independent things."
)


def distance_explained(reference: str) -> str:
    return f"The distance to {reference} is the mean difference between the two maps, entry by entry: 0 for equal maps."


def map_section(runs: list[RunSummary], maps: dict[str, dict[str, CorrelationMap]]) -> str:
    if not maps:
        return "<p>No run has written weights that can be read, so there is nothing to look at.</p>"
    finished = {name: CorrelationMap(name, stages["finished"].cosines) for name, stages in maps.items()}
    rows = layout_rows([run for run in runs if run.name in finished], finished)
    reference = _reference(runs, finished)
    explanations = [RANK_EXPLAINED] if reference is None else [RANK_EXPLAINED, distance_explained(reference.name)]
    parts = [
        "<p>Entry (i, j) is the absolute cosine between dimensions i and j of the finished vectors over the whole "
        "vocabulary: 1 on the diagonal, 0 where two dimensions are independent. Under every map stand the mean of all "
        "entries off the diagonal, and its effective rank.</p>",
        figure(inline_svg(maps_figure(rows), "Correlation maps of the finished vectors")),
        wide(html_table(*numbers_table(list(finished.values()), reference))),
        f"<p>{html.escape(' '.join(explanations))}</p>",
    ]
    for name, stages in maps.items():
        if any(stage.groups > 1 for stage in stages.values()):
            layers = inline_svg(maps_figure(layer_rows(stages)), f"Correlation maps of {name}, layer by layer")
            groups = inline_svg(groups_figure(list(stages.values())), f"Cosines between the groups of {name}")
            table = html_table(*numbers_table(list(stages.values())))
            parts.append(
                f"<details><summary>{html.escape(name)}, layer by layer</summary>"
                f"{figure(layers)}{wide(table)}<h3>Between the groups of a layer</h3>"
                f"<p>{GROUPS_EXPLAINED}</p>{figure(groups)}</details>"
            )
    return "".join(parts)


def layout_rows(runs: list[RunSummary], finished: dict[str, CorrelationMap]) -> list[tuple[str, list[CorrelationMap]]]:
    """The paper's layout: standard tables, then projected ones, then DeFINE, each by the width of its table.

    Adaptive tables without a unit, which the paper does not show, stand behind the standard ones.
    """
    kinds: dict[str, list[RunSummary]] = {"Standard": [], "Adaptive": [], "Projected": [], "DeFINE": []}
    for run in runs:
        settings = run.recipe.embedding
        if settings.unit in ("projection", "mlp") or settings.map == "projective":
            kinds["Projected"].append(run)
        elif settings.unit == "none":
            kinds[settings.map.capitalize()].append(run)
        else:
            kinds["DeFINE"].append(run)
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
