"""``make lint`` checks public_face.py as strictly as mypy can; here, that the file leaves out no public name."""

import ast
from pathlib import Path

import torchdefine

FACE = Path(__file__).with_name("public_face.py")


def test_the_strictly_checked_file_uses_every_public_name() -> None:
    tree = ast.parse(FACE.read_text())
    doors = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "torchdefine"]
    assert {name.name for door in doors for name in door.names} == set(torchdefine.__all__)


def test_type_checkers_are_told_that_the_package_has_types() -> None:
    assert Path(torchdefine.__file__).with_name("py.typed").exists()
