"""The site: all its pages are in the menu, and its links lead somewhere."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build_site
import pytest
import yaml
from build_site import ROOT, made, pages
from check_site import problems

import torchdefine

CONFIG = (ROOT / "mkdocs.yml").read_text()


def leaves(menu: Any) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    else:
        for item in menu.values() if isinstance(menu, dict) else menu:
            yield from leaves(item)


def test_the_menu_has_the_chapters_in_order() -> None:
    chapters = [next(iter(item)) for item in yaml.safe_load(CONFIG)["nav"]]
    wanted = "Quickstart, Shrink a model, Train with small tables, Large tables, Concepts, Recipes, Paper and evidence"
    wanted += ", API reference, Benchmarks, Cookbook, Security, Contributing"
    assert chapters == ["torchdefine", *wanted.split(", ")]


def test_every_page_is_in_the_menu_once() -> None:
    """A new page needs a line in mkdocs.yml."""
    places = list(leaves(yaml.safe_load(CONFIG)["nav"]))
    assert len(set(places)) == len(places)
    assert set(places) == {place.as_posix() for place in (*pages(), *made())}


def test_every_public_name_is_explained() -> None:
    reference = {place.stem: text for place, text in made().items() if place.parent.name == "api"}
    for name in torchdefine.__all__:
        line = next(line for line in reference["index"].splitlines() if line.startswith(f"- [`{name}`]("))
        assert line.split("): ")[1], f"{name} has no docstring"
        room = line.split("](")[1].split(".md#")[0]
        assert f'"torchdefine.{name}"' in reference[room] or f"{{#torchdefine.{name}}}" in reference[room]


@pytest.fixture
def gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build_site, "OUT", tmp_path / "docs")
    build_site.main()
    return tmp_path / "docs"


def test_the_pages_link_to_files_that_exist(gathered: Path) -> None:
    """build_site itself refuses a link to a missing file of the project; here, links between its pages."""
    for page in gathered.rglob("*.md"):
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", prose):
            assert (page.parent / link).exists(), f"{page.relative_to(gathered)} links to {link}"


def test_bad_links_of_a_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">1</a> <a href="b.html#gone">2</a> <a href="c.html">3</a> <a href="https://example.org">4</a>'
        '<img src="https://example.org/pixel.png"> <script src="gone.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    (tmp_path / "a.css").write_text("@import url(https://example.org/font.css); b { background: url(data:image/png) }")
    assert sorted(problems(tmp_path)) == [
        "a.css loads https://example.org/font.css",
        "a.html links to b.html#gone: there is no such place in that page",
        "a.html links to c.html: there is no such file",
        "a.html links to gone.js: there is no such file",
        "a.html loads https://example.org/pixel.png",
    ]


@pytest.mark.slow
def test_the_built_site_has_no_bad_links_and_asks_no_other_server(gathered: Path) -> None:
    config = CONFIG.replace("build/docs", "docs").replace("build/site", "site").replace("[src]", f"[{ROOT / 'src'}]")
    (gathered.parent / "mkdocs.yml").write_text(config)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict"], cwd=gathered.parent, check=True)
    assert len(list((gathered.parent / "site").rglob("*.html"))) > len(pages())
    assert list(problems(gathered.parent / "site")) == []
