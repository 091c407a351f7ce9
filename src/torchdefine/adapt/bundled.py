"""The source of some of our classes in one file that needs torch alone: what they use, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchdefine.errors import UserError

_PACKAGE = "torchdefine"
_OWN_NAMES = {"UserError": "ValueError"}
"""What is not carried along, by what takes its place."""


def bundled(roots: Sequence[Any], left_out: Collection[str] = ()) -> str:
    """Python that defines these classes and functions; of a class it has the methods that something in it calls.

    Names that are ``left_out`` are defined by whoever asks.
    """
    bundle = _Bundle(left_out)
    for root in roots:
        bundle.need(root.__module__, root.__name__)
    while bundle.grow():  # a method that was left out may be called by what came later
        pass
    replaced = [f"{name} = {other}" for name, other in _OWN_NAMES.items() if name in bundle.replaced]
    return "\n\n".join(["\n".join(sorted(bundle.imports)), *replaced, *map(ast.unparse, bundle.in_order())])


@dataclass
class _Bundle:
    """Definitions by module and name, and what is still missing."""

    left_out: Collection[str]
    found: dict[tuple[str, str], ast.stmt] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    """Names after a dot, anywhere in what was found: methods of these names stay."""
    replaced: set[str] = field(default_factory=set)
    _trees: dict[str, ast.Module] = field(default_factory=dict)

    def need(self, module: str, name: str) -> None:
        """Find a name of one of our modules, and all that it needs."""
        if name in _OWN_NAMES:
            self.replaced.add(name)
        elif (
            name not in self.left_out
            and (module, name) not in self.found
            and (node := self._defined(module, name)) is not None
        ):
            if isinstance(node, ast.Import | ast.ImportFrom):
                return self._follow(module, node, name)
            self.found[module, name] = node
            self._read(module, node)

    def grow(self) -> bool:
        """Read methods that have become needed; whether there were any."""
        before = len(self.found), len(self.attributes), len(self.imports)
        for (module, _), node in list(self.found.items()):
            self._read(module, node)
        return before != (len(self.found), len(self.attributes), len(self.imports))

    def in_order(self) -> Iterator[ast.stmt]:
        """Definitions without what nobody calls, each after those that it needs when it is read."""
        waiting = {name: _documented_less(self._kept(node)) for (_, name), node in self.found.items()}
        while waiting:
            ready = [name for name, node in waiting.items() if not (_at_once(node) & waiting.keys()) - {name}]
            if not ready:
                raise UserError(f"The code of {', '.join(waiting)} goes in circles, so it cannot stand in one file.")
            for name in ready:
                yield waiting.pop(name)

    def _defined(self, module: str, name: str) -> ast.stmt | None:
        for node in self._tree(module).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return node
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
            if isinstance(node, ast.Import | ast.ImportFrom) and any(
                (alias.asname or alias.name.split(".")[0]) == name for alias in node.names
            ):
                return node
        return None  # a builtin, or a local name

    def _follow(self, module: str, node: ast.Import | ast.ImportFrom, name: str) -> None:
        (alias,) = (one for one in node.names if (one.asname or one.name.split(".")[0]) == name)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == _PACKAGE:
            self.need(str(node.module), alias.name)
        else:
            self.imports.add(ast.unparse(type(node)(**{**vars(node), "names": [alias]})))

    def _read(self, module: str, node: ast.stmt) -> None:
        for part in ast.walk(self._kept(node)):
            if isinstance(part, ast.Attribute):
                self.attributes.add(part.attr)
            elif isinstance(part, ast.Name):
                self.need(module, part.id)

    def _kept(self, node: ast.stmt) -> ast.stmt:
        """A class with the methods that are called; anything else as it is. No annotations: nobody reads them."""
        return _Slimmer(self.attributes).visit(ast.parse(ast.unparse(node)).body[0])

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            spec = find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            self._trees[module] = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        return self._trees[module]


class _Slimmer(ast.NodeTransformer):
    """Leaves out methods that nobody calls, and what annotations say."""

    def __init__(self, attributes: set[str]) -> None:
        self.attributes = attributes

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [
            part
            for part in node.body
            if not isinstance(part, ast.FunctionDef)
            or part.name in {"forward", *self.attributes}
            or part.name.startswith("__")
        ]
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
            if argument is not None:
                argument.annotation = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:  # a field, whose name counts
            node.annotation = ast.Name("object")
            return node
        return self.generic_visit(ast.copy_location(ast.Assign([node.target], node.value), node))


def _documented_less(node: ast.stmt) -> ast.stmt:
    """Without lone strings: they speak of what may not be there."""
    for part in ast.walk(node):
        if isinstance(part, ast.ClassDef | ast.FunctionDef):
            body = [one for one in part.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            part.body = body or [ast.Pass()]
    return ast.fix_missing_locations(node)


def _at_once(node: ast.stmt) -> set[str]:
    """Names that a definition needs when it is read: bases, decorators, defaults and values, but no bodies."""
    if isinstance(node, ast.FunctionDef):
        parts: list[ast.AST] = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]  # type: ignore[list-item]
    elif isinstance(node, ast.ClassDef):
        nested = (_at_once(one) for one in node.body)
        parts = [*node.bases, *node.decorator_list]
        return set().union(
            *nested, *({one.id for one in ast.walk(part) if isinstance(one, ast.Name)} for part in parts)
        )
    else:
        parts = [node]
    return {one.id for part in parts if part is not None for one in ast.walk(part) if isinstance(one, ast.Name)}
