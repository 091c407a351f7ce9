"""The page with the budget: its data are the stored rows, and a browser shows what they say."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.site.browser import Page, browser_path, opened
from torchdefine.cli.command_line import make_parser

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from build_fronts import RESULTS, fronts_page  # noqa: E402
from build_site import pages  # noqa: E402

PAGE = fronts_page()
DATA: list[dict[str, Any]] = json.loads(re.findall(r'id="data">(.*?)</script>', PAGE, re.DOTALL)[0])
BUDGETS = [
    (table["name"], budget) for table in DATA for budget in (table["start"], table["full"], 0.5 * table["start"])
]


def points_of(table: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(method["title"], point) for method in table["methods"] for point in method["points"]]


def test_every_stored_row_is_in_the_page() -> None:
    assert {table["name"] for table in DATA} == {path.name for path in RESULTS.iterdir() if path.is_dir()}
    for table in DATA:
        shown = {(title, point["bytes"]): point for title, point in points_of(table)}
        names = [measure["name"] for measure in table["measures"]]
        for path in (RESULTS / table["name"]).glob("*.json"):
            stored = json.loads(path.read_text())
            for row in stored["rows"]:
                if row["bytes"] and stored["method"]["name"] != "full":
                    values = shown[stored["method"]["title"], row["bytes"]]["values"]
                    wanted = [row["measures"][name]["value"] for name in names]
                    assert [value for value, _ in values] == pytest.approx(wanted, rel=1e-5)


def test_the_page_is_small_and_asks_no_server() -> None:
    assert len((ROOT / "docs" / "fronts.html").read_text()) < 18_000
    assert not re.search(r"(?:https?:)?//[\w.]+\.\w|@import|url\(", PAGE.replace(json.dumps(DATA), ""))
    assert "default-src 'none'" in PAGE


def test_its_links_lead_to_pages_of_the_site() -> None:
    places = {str(place.with_suffix(".html")) for place in pages()}
    links = {link for link in re.findall(r'href="([^"]+)"', PAGE) if not link.startswith("data:")}
    assert len(links) == 4
    assert links <= places


def test_the_commands_are_understood() -> None:
    parser, _ = make_parser()
    commands = {point["command"] for table in DATA for _, point in points_of(table) if "command" in point}
    assert len(commands) > 8
    for command in commands:
        if command.startswith("torchdefine "):
            parser.parse_args(shlex.split(command)[1:])
        else:
            compile(command, "page", "exec")


def nearest(table: dict[str, Any], budget: float) -> list[tuple[str, dict[str, Any]]]:
    """Of each method the nearest measured point at or under the budget; the best by the first measure first."""
    found: dict[str, dict[str, Any]] = {}
    for title, point in points_of(table):
        if point["bytes"] <= budget and point["bytes"] >= found.get(title, point)["bytes"]:
            found[title] = point
    sign = 1 if table["measures"][0]["lower"] else -1
    return sorted(found.items(), key=lambda one: sign * one[1]["values"][0][0])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if browser_path() is None:
        pytest.skip("no Chromium is installed")
    with opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("site") / "fronts.html"
    path.write_text(PAGE)
    return path.as_uri()


@pytest.mark.parametrize(("name", "budget"), BUDGETS)
def test_a_browser_shows_the_nearest_measured_points(name: str, budget: float, page: Page, address: str) -> None:
    table = next(table for table in DATA if table["name"] == name)
    page.open(f"{address}#{urlencode({'table': name, 'budget': budget})}")
    shown = page.tell("[...document.querySelectorAll('#rows tr:not(.none)')].map(row => row.innerText)")
    wanted = nearest(table, max(budget, 0.95 * min(point["bytes"] for _, point in points_of(table))))
    assert len(shown) == len(wanted)
    for line, (title, point) in zip(shown, wanted, strict=True):
        value = point["values"][0][0]
        assert line.startswith(title)
        assert (f"{value:.2f}" if value >= 20 else f"{value:.4f}") in line
    ours = next((point["command"] for _, point in wanted if "command" in point), "")
    assert page.tell("document.getElementById('command').textContent") == ours
    assert page.tell("document.querySelectorAll('#chart path[transform]').length") == len(points_of(table))


def test_a_keyboard_moves_the_budget_and_the_address_follows(page: Page, address: str) -> None:
    page.open(f"{address}#table=minilm")
    page.tell("document.getElementById('budget').focus()")
    page.press("Home")
    assert page.tell("document.getElementById('best').textContent").startswith("Nothing was measured at or under")
    assert page.tell("getComputedStyle(document.getElementById('make')).display") == "none"
    page.press("End")
    assert "torchao" in page.tell("document.getElementById('best').textContent")
    least = page.tell("+new URLSearchParams(location.hash.slice(1)).get('budget')")
    page.press("ArrowLeft")
    assert page.tell("+new URLSearchParams(location.hash.slice(1)).get('budget')") < least
    page.press("Tab")
    page.press("Tab")
    assert page.tell("document.activeElement.id") == "copy"
    page.tell("document.activeElement.onclick()")
    assert page.tell("document.activeElement.textContent") in ("Copied", "Selected")


@pytest.mark.parametrize("width", [320, 760, 1400])
def test_nothing_is_wider_than_the_window(width: int, page: Page, address: str) -> None:
    page.resize(width, 800)
    page.open(f"{address}#table=compared-lstm")
    assert page.tell("document.documentElement.scrollWidth") <= width


def test_another_table_and_measure_are_chosen_and_nothing_is_fetched(page: Page, address: str) -> None:
    page.open(address)
    change = "(id, value) => {const one = document.getElementById(id); one.value = value; one.onchange({target: one})}"
    page.tell(f"({change})('table', 'energetic')")
    page.tell(f"({change})('measure', '1')")
    assert page.tell("document.getElementById('caption').textContent").startswith("same neighbours")
    assert {request.split("#")[0] for request in page.requests} <= {address, "about:blank", "data:,"}
