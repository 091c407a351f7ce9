"""The rooms of the package stand in an order, and each imports only those above it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "torchdefine"
FRONT_DOORS = {"__init__", "__main__", "__version__"}


def rooms_in_order() -> list[str]:
    """As the picture in CONTRIBUTING.md has them."""
    (tree,) = re.findall(
        r"^src/torchdefine/\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE
    )
    rooms = []
    for line in tree.splitlines():
        names, _, _ = line.strip().partition("  ")
        rooms += [name.rstrip("/").removesuffix(".py") for name in names.split()]
    return rooms


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """The rooms that a file imports, with the lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "torchdefine":
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, part) for part in re.findall(r"^torchdefine\.(\w+)", node.module))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, part) for a in node.names for part in re.findall(r"^torchdefine\.(\w+)", a.name))


def test_the_picture_has_every_room() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path.is_dir() and path.name[0] != "_")}
    assert set(rooms_in_order()) == found - FRONT_DOORS


def test_rooms_import_only_rooms_above_them() -> None:
    place = {room: index for index, room in enumerate(rooms_in_order())}
    wrong, seen = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in FRONT_DOORS:
            continue
        for line, imported in imports_of(path):
            if imported in place and imported != room:
                seen += 1
                if place[imported] > place[room]:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong
    assert seen > 400
