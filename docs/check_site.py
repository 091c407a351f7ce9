"""Check the built site, a part of `make docs`: links lead somewhere, and nothing is asked of another server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
IN_STYLES = re.compile(r"""url\(["']?([^"')]+)|@import\s+["']([^"']+)""")


class Page(HTMLParser):
    """What a page links to, what it loads to be shown, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next") and "href" in given:
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


def problems(site: Path) -> Iterator[str]:
    """A sentence for each link that leads nowhere, and for each thing that would be loaded from elsewhere."""
    pages = {file.resolve(): Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        where = file.relative_to(site.resolve())
        yield from (f"{where} loads {load}" for load in page.loads if is_outside(load))
        for link in (*page.links, *page.loads):
            if not (is_outside(link) or link.startswith("data:")) and (said := broken(link, file, pages)):
                yield f"{where} links to {link}: {said}"
    for style in sorted(site.rglob("*.css")):
        for found in IN_STYLES.finditer(style.read_text()):
            if is_outside(target := found[1] or found[2]):
                yield f"{style.relative_to(site)} loads {target}"


def is_outside(address: str) -> bool:
    return bool(urlparse(address).netloc) or address.startswith("mailto:")


def broken(link: str, file: Path, pages: dict[Path, Page]) -> str:
    """What is wrong with a link within the site; empty if nothing is."""
    path, place = urldefrag(unquote(link))
    if path.startswith("/"):  # of the page for addresses that do not exist, which can be shown in any folder
        return ""
    target = (file.parent / path).resolve() if path else file
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return "there is no such file"
    known = place in ("", "__skip") or target not in pages or place in pages[target].places
    return "" if known else "there is no such place in that page"


if __name__ == "__main__":
    found = list(problems(SITE))
    print("\n".join(found) or "Every link of the site leads somewhere, and nothing is loaded from elsewhere.")
    sys.exit(bool(found))
