"""docs/paper….md have every published row, and what our runs were is read from their files."""

import re
from importlib import import_module
from typing import Any

import pytest

from torchdefine.recipe import load_recipe, recipe_names

page, paper_runs = import_module("paper_page"), import_module("paper_runs")
PAPER = page.read_paper()
ROWS = [row for table in [*PAPER["tables"], *PAPER["ablations"]] for row in page.rows_of(table)]
TEXTS = page.paper_pages(PAPER)


def test_the_pages_are_what_the_generator_gives() -> None:
    assert {name: (page.DOCS / name).read_text() for name in TEXTS} == TEXTS, "`make results` writes them anew."


def test_every_published_recipe_has_a_row_and_every_row_a_recipe_or_a_reason() -> None:
    published = {name for name in recipe_names() if load_recipe(name).published}
    without_a_row = {"ptb/qrnn"}  # a row of another paper
    assert published - without_a_row <= {row.get("recipe") for row in ROWS} <= published | {None}
    for row in ROWS:
        assert row.get("runs") or row.get("not_run") or row.get("not_here"), row
        assert ("recipe" in row) != ("not_here" in row), row


def test_every_run_is_stored() -> None:
    for row in ROWS:
        for runs in row.get("runs", ()):
            assert paper_runs.stored(runs, row.get("part"))
    with pytest.raises(FileNotFoundError, match="no results/wiki78m/decisive/r9"):
        paper_runs.stored("wiki78m/decisive/r9-seed-*")


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    for target, _, place in re.findall(r"\]\((?!http)([^)#]*)(#([^)]*))?\)", TEXTS[name]):
        file = (page.DOCS / (target or name)).resolve()
        assert file.exists(), target
        if place:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert place in {re.sub(r"[^\w -]", "", title).replace(" ", "-").lower() for title in titles}, place


def line_of(row: str, **given: Any) -> list[list[str]]:
    """The lines that a row gets with test perplexities alone."""
    metrics = [page.METRICS["test"]]
    given = {"row": row, "corpus_tokens": 103e6, **given}
    ours = [paper_runs.ran(given, runs) for runs in given.get("runs", ())]
    told = {shows.folder: paper_runs.common_training([shows]) for shows in ours}
    return list(page.row_cells(given, ours, metrics, told))


def test_a_run_that_had_our_changes_says_so() -> None:
    (literal,) = line_of("R2", recipe="table1a/r2", runs=["wiki78m/decisive/r2-seed-*"])
    assert literal[1] == "`table1a/r2`, as published"
    assert literal[4:6] == ["44.87", "as published"]
    (changed,) = line_of("R3", recipe="table1a/r3", runs=["wiki78m/decisive/r3-seed-*"])
    assert changed[5].startswith("our variant: ")
    assert {"`embedding.scale` unit-rms", "`unit.weight_scaling` true"} <= set(changed[5][13:].split(", "))
    assert changed[6] == "80 M of wiki78m, 3.9%"


def test_two_seeds_give_their_mean() -> None:
    (cells,) = line_of("R3", recipe="table1a/r3", runs=["wiki78m/decisive/r3-seed-*"])
    runs = paper_runs.stored("wiki78m/decisive/r3-seed-*")
    assert len(runs) == 2
    assert float(cells[-1]) == pytest.approx(sum(run["test_perplexity"] for run in runs) / 2, abs=0.005)


def test_a_row_without_runs_says_why() -> None:
    (cells,) = line_of("QRNN", published={"total": 151, "test_perplexity": 33.0}, not_here="there is no QRNN")
    assert cells == ["QRNN", "–", "151", "–", "33", "not here, because there is no QRNN", "–", "–"]


def test_hyper_parameters_are_those_of_the_recipe() -> None:
    recipe = load_recipe(PAPER["hyper_parameters"]["recipe"]).to_plain()
    for row in PAPER["hyper_parameters"]["rows"]:
        if isinstance(row["published"], int) and "settings" in row:
            (place,) = row["settings"]
            section, name = place.split(".")
            assert recipe[section][name] == row["published"], row
