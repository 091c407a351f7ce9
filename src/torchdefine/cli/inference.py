"""Commands that make a run cheaper to use."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields, replace
from typing import Any

from torchdefine.cli.shared import CHECKPOINTS, Command, add_device, print_json
from torchdefine.errors import UserError
from torchdefine.tables import METHODS, Budget, table_method

CACHE_DTYPES = ["fp32", "bf16", "fp16"]
COMPRESSING = (
    "\n".join(f"  {name:9} {entry.summary}" for name, entry in METHODS.items())
    + """
Without a --budget, int8 and int4 take what they need, codes what --codebooks × --entries come to, and all others as
much as codes of 32 × 16, but an eighth of the vectors at most. A run has one packed table: another compress replaces
it. Only the vectors that the input looks up are packed; the output layer of a language model still needs the map's
table. Then: eval RUN --compressed."""
)


def add_commands(command: Command) -> None:
    """The commands that prepare a run for use."""
    sub = command(
        "cache",
        _cache,
        "Write the vectors of all tokens beside a run's weights, so that --cached inference needs no unit.",
    )
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument("--dtype", default="fp32", choices=CACHE_DTYPES, help="of the vectors (default: fp32)")
    _add_shared(sub)

    sub = command(
        "compress", _compress, "Pack the vectors of all tokens into few bytes beside a run's weights.", COMPRESSING
    )
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument("--method", default="bits", metavar="NAME", choices=METHODS, help="how (default: bits)")
    sub.add_argument("--budget", metavar="SIZE", help="bytes at most, as in 200KB")
    sub.add_argument("--codebooks", type=int, metavar="M", help="codes of a token (default: 32)")
    sub.add_argument("--entries", type=int, metavar="K", help="of a codebook: 2, 4, 8 … 256 (default: 16)")
    sub.add_argument("--steps", type=int, help="of training codes or a unit, at most (default: 4000 or 2000)")
    sub.add_argument("--seed", type=int, help="of that training (default: 0)")
    _add_shared(sub)


def _add_shared(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--checkpoint", default="best", choices=CHECKPOINTS, help="which weights (default: best)")
    add_device(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")


def _cache(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import load_run
    from torchdefine.training.progress import work_bar

    run = load_run(options.folder, checkpoint=options.checkpoint, device=options.device)
    with work_bar("computing vectors") as progress:
        written = run.cache(options.dtype, progress)
    if options.json:
        print_json({"run": str(options.folder), "files": {str(file): size for file, size in written.items()}})
        return
    for file, size in written.items():
        print(f"{file}: {size:,} bytes")


def _compress(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import load_run
    from torchdefine.training.progress import work_bar

    settings, budget = _settings(options), None if options.budget is None else Budget.of(options.budget)
    if budget is not None and budget.floats_only:
        raise UserError(f"The budget {options.budget!r} counts parameters, not bytes: use 200KB, say.")
    run = load_run(options.folder, checkpoint=options.checkpoint, device=options.device)
    with work_bar(f"packing by {options.method}") as progress:
        made = run.compress(options.method, budget, progress=progress, **settings)
    if options.json:
        files = {str(file): one.to_dict() for file, one in made.items()}
        print_json({"run": str(options.folder), "files": files})
        return
    for file, one in made.items():
        print(
            f"{file}: {one.bytes:,} bytes as {one.label}, {one.vectors_bytes / one.bytes:.1f} times smaller than the "
            f"vectors ({one.vectors_bytes:,}) and {one.map_bytes / one.bytes:.1f} times than the map they "
            f"come from ({one.map_bytes:,})"
        )
        weighted = one.lost_by_frequency
        by_use = "" if weighted is None else f", {weighted:.2%} if tokens count as often as they occur"
        print(f"{one.lost:.2%} of the vectors' variance is lost{by_use}.")
    weights = "" if options.checkpoint == "best" else f" --checkpoint {options.checkpoint}"
    print(f"Measure what that costs: torchdefine eval {shlex.quote(options.folder)} --compressed{weights}")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a method; an option that would have no effect is refused."""
    names = ("codebooks", "entries", "steps", "seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    known = {field.name for field in fields(METHODS[options.method].kind)}  # type: ignore[arg-type]
    known |= {"steps", "seed"} if "training" in known else set()
    for name in given:
        if name not in known:
            raise UserError(f"--{name} means nothing to the method {options.method}: leave it out.")
    if options.budget is not None and "codebooks" in given:
        raise UserError("--budget and --codebooks both say how large the codes are: give one of them.")
    training = {name: given.pop(name) for name in ("steps", "seed") if name in given}
    if training:
        given["training"] = replace(table_method(options.method).training, **training)  # type: ignore[attr-defined]
    return given
