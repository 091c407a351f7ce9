"""Rows of a table: made, judged, and kept in a JSON file for each method."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leaderboard.board import Method, Table
from torchdefine.errors import UserError
from torchdefine.files import cache_folder, read_json, write_json
from torchdefine.run.environment import describe_environment

FORMAT = {"format": "torchdefine leaderboard", "version": 1}
SEED = 0


def measure(
    table: Table,
    methods: Mapping[str, Method],
    folder: Path,
    sizes: Sequence[int] = (),
    again: Collection[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Measure what ``folder`` lacks, a row at a time, so that an ended run goes on where it was.

    ``again`` names methods whose rows are dropped first.
    """
    dropped = [folder / f"{name}.json" for name in again]
    _check_same_facts(table, [path for path in sorted(folder.glob("*.json")) if path not in dropped])
    for path in dropped:
        path.unlink(missing_ok=True)
    missing = {name: why for name, method in methods.items() if (why := _missing_package(method))}
    for name, package in missing.items():
        say(f"{name} is not measured: it needs {package}.")
    for name, budget in _wanted(table, {k: v for k, v in methods.items() if k not in missing}, sizes):
        method, path = methods[name], folder / f"{name}.json"
        rows: list[dict[str, Any]] = read_json(path)["rows"] if path.exists() else []
        if any(row["budget"] == budget for row in rows):
            continue
        rows.append(_row(table, method, budget))
        rows.sort(key=lambda row: -row["budget"])
        said = {"name": name, "title": method.title, "settings": dict(method.settings)}
        write_json(path, {**FORMAT, "table": table.facts, "method": said, "rows": rows})
        say(_line(method, next(row for row in rows if row["budget"] == budget)))


def _wanted(table: Table, methods: Mapping[str, Method], sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """The methods and budgets, the smallest first: they are made fastest, and differ most."""
    pairs = [
        (budget, name)
        for name, method in methods.items()
        if method.suits(table)
        for budget in (method.sizes(table) if method.sizes else sizes or table.sizes)
    ]
    return ((name, budget) for budget, name in sorted(pairs))


def _row(table: Table, method: Method, budget: int) -> dict[str, Any]:
    torch.manual_seed(SEED)
    began = time.monotonic()
    packed = method.pack(table, budget)
    row: dict[str, Any] = {"budget": budget, "bytes": None, "seed": SEED, "seconds": round(time.monotonic() - began, 1)}
    if packed is not None:
        if packed.bytes > budget:
            raise UserError(f"{method.title} took {packed.bytes:,} bytes of {budget:,}: its pack() must keep to them.")
        measures, said = table.judge(packed)
        row |= {"bytes": packed.bytes, "label": packed.label, "rows": len(packed.matrix), **said}
        row["measures"] = {name: asdict(one) for name, one in measures.items()}
    environment = describe_environment(torch.device("cpu"))
    environment["versions"] |= {package: version(package) for package in method.packages}
    return row | environment


def _line(method: Method, row: Mapping[str, Any]) -> str:
    if row["bytes"] is None:
        return f"{method.title}: {row['budget']:,} bytes do not suffice"
    numbers = "; ".join(f"{name} {one['value']:.4f}" for name, one in row["measures"].items())
    return f"{method.title}, {row['bytes']:,} bytes: {numbers}"


def _missing_package(method: Method) -> str | None:
    for package in method.packages:
        try:
            version(package)
        except PackageNotFoundError:
            return package
    return None


def _check_same_facts(table: Table, paths: Sequence[Path]) -> None:
    """Rows compare only if all of a table were judged on the same."""
    own = json.loads(json.dumps(table.facts))
    for path in paths:
        stored = read_json(path)["table"]
        if stored != own:
            other = next(name for name in (own | stored) if own.get(name) != stored.get(name))
            raise UserError(
                f"{path} was measured with another {other!r}, and rows of two do not compare: measure all methods anew "
                "with --again, or give another --out."
            )


def once(facts: Mapping[str, Any], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What is prepared for all rows of a table: from a file in the cache, if it was made before for the same facts."""
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    kept = cache_folder() / "leaderboard" / f"{name}.safetensors"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: one.contiguous() for key, one in make().items()}, kept)
    return load_file(kept)
