"""Gather the pages of the documentation site in build/docs: `make docs`.

Pages are those of docs/, the README as the first one, the notebooks, and the pages of results/. A list of the recipes
and an API reference of every public name are made here.
Links between them stay links; links to other files of the project lead to its repository.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shutil
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

from build_fronts import fronts_page
from notebook_page import notebook_page
from recipes_page import recipes_page

import torchdefine
from torchdefine.config import Config, explain

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "docs"
AT_THE_TOP = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]*)(#[^)\s]*)?(?=\))")
ROOMS = (
    *("embedding", "output", "context", "tables", "adapt", "adapt.huggingface", "data", "training", "task", "recipe"),
    *("run", "export", "config", "errors"),
)
"""Whose public names the reference lists."""
NAMES = sorted(torchdefine.__all__, key=str.lower)


def repository() -> str:
    """Where the project's files can be read."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return f"{project['urls']['Repository']}/blob/main"


def pages() -> dict[Path, Path]:
    """Every page of the site that a file is the source of: the file, by where the page goes."""
    found = {Path("index.md"): ROOT / "README.md"}
    found |= {Path(page.name): page for page in sorted((ROOT / "docs").glob("*.md"))}
    found[Path("fronts.html")] = ROOT / "docs" / "fronts.html"
    found[Path("all-pages.md")] = found.pop(Path("README.md"))  # a README would be an index, as those of results/
    found |= {Path("notebooks") / f"{page.stem}.md": page for page in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    found |= {Path(name): ROOT / name for name in AT_THE_TOP}
    for page in sorted((ROOT / "results").rglob("*.md")):
        place = page.relative_to(ROOT)
        found[place.parent.with_suffix(".md") if place.name == "README.md" else place] = page
    return found


def text_of(place: Path, all_pages: dict[Path, Path]) -> str:
    """What stands on a page that a file is the source of."""
    source = all_pages[place]
    if source.suffix == ".html":
        return fronts_page()
    own = notebook_page(source, OUT / "pictures" / source.stem) if source.suffix == ".ipynb" else source.read_text()
    return linked(own, source, place, all_pages)


def linked(text: str, source: Path, place: Path, all_pages: dict[Path, Path]) -> str:
    """A page with its links as the site has them; pictures that it shows are copied."""
    places = {origin.resolve(): where for where, origin in all_pages.items()}

    def link(found: re.Match[str]) -> str:
        target, anchor = (source.parent / found[1]).resolve(), found[2] or ""
        if target in places:
            return relative(places[target], place) + anchor
        if OUT in target.parents:
            return relative(target.relative_to(OUT), place)
        if target.suffix in (".svg", ".png"):
            picture = Path("pictures") / target.relative_to(ROOT)
            (OUT / picture).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, OUT / picture)
            return relative(picture, place)
        if not target.exists():
            raise SystemExit(f"{source.relative_to(ROOT)} links to {found[1]}, which does not exist.")
        return f"{repository()}/{target.relative_to(ROOT)}{anchor}"

    return LINK.sub(link, text)


def relative(target: Path, page: Path) -> str:
    return os.path.relpath(target, page.parent)


def public_names(module: ModuleType) -> list[str]:
    """What a room offers: the names of its door that are defined in it, or bound there to a method."""
    offered = getattr(module, "__all__", vars(module))
    names = [name for name in offered if not name.startswith("_") and callable(getattr(module, name))]
    return sorted(name for name in names if home_of(module, name).startswith((module.__name__, "torchdefine.config")))


def home_of(module: ModuleType, name: str) -> str:
    return str(getattr(getattr(module, name), "__module__", ""))


def made() -> dict[Path, str]:
    """The pages that have no file: the recipes, what `import torchdefine` offers, and a page for each room."""
    rooms = {name: import_module(f"torchdefine.{name}") for name in ROOMS}
    where = {name: room for room, module in rooms.items() for name in public_names(module)}
    door = [f"- [`{name}`]({where[name]}.md#torchdefine.{name}): {first_line(torchdefine, name)}" for name in NAMES]
    table = [f"- [`torchdefine.{room}`]({room}.md): {first_sentence(module.__doc__)}" for room, module in rooms.items()]
    index = ["# API reference", "", "## `import torchdefine`", "", *door, "", "## Modules", "", *table, ""]
    found = {Path("recipes.md"): recipes_page(), Path("api/index.md"): "\n".join(index)}
    return found | {Path(f"api/{room}.md"): room_page(module) for room, module in rooms.items()}


def room_page(module: ModuleType) -> str:
    lines = [f"# `{module.__name__}`", "", first_sentence(module.__doc__), ""]
    for name in (name for name in public_names(module) if is_own(module, name)):
        lines += entry(module, name)
    return "\n".join(lines)


def first_line(module: ModuleType, name: str) -> str:
    return first_sentence(inspect.getdoc(getattr(module, name)))


def first_sentence(docstring: str | None) -> str:
    return (docstring or "").split("\n\n")[0].replace("\n", " ")


def is_own(module: ModuleType, name: str) -> bool:
    """Not a class of the settings' machinery that a room only uses."""
    return home_of(module, name).startswith(module.__name__) or getattr(module, name).__name__ == "register"


def entry(module: ModuleType, name: str) -> list[str]:
    """A name's heading, signature and docstring; the anchor is the shortest way to import it."""
    value = getattr(module, name)
    anchor = f"torchdefine.{name}" if name in torchdefine.__all__ else f"{module.__name__}.{name}"
    if value.__name__ != name:  # a registry's method under a name of its own
        described = inspect.getdoc(value) or ""
        return [f"## {name} {{#{anchor}}}", "", f"```python\n{name}{inspect.signature(value)}\n```", "", described, ""]
    is_config = isinstance(value, type) and issubclass(value, Config)
    options = "{heading_level: 2, merge_init_into_class: false}" if is_config else "{heading_level: 2}"
    described = [f'<a id="{anchor}"></a>', "", f"::: {home_of(module, name)}.{name}", f"    options: {options}", ""]
    return [*described, *settings(value)] if is_config else described


def settings(config: type[Config]) -> list[str]:
    """The settings of a part, as `--help` tells them."""
    if not all("help" in field.metadata for field in dataclasses.fields(config) if field.name != "kind"):
        return []  # options of Python alone, which a docstring tells
    rows = [f"| `{name}` | {said} | {default} |" for name, said, default in explain(config)]
    return ["| setting | meaning | default |", "|---|---|---|", *rows, ""] if rows else []


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    found = pages()
    for place in found:
        (OUT / place).parent.mkdir(parents=True, exist_ok=True)
        (OUT / place).write_text(text_of(place, found))
    shutil.copyfile(ROOT / "docs" / "site.css", OUT / "site.css")
    (OUT / "api").mkdir()
    for place, text in made().items():
        (OUT / place).write_text(text)


if __name__ == "__main__":
    main()
