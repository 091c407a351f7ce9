"""Commands that make a run cheaper to use."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from torchdefine.cli.shared import CHECKPOINTS, Command, add_device, print_json
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from torchdefine.inference.compress import Compression

CACHE_DTYPES = ["fp32", "bf16", "fp16"]
METHODS = ["codes", "product-codes", "svd", "bits", "int8", "int4"]

COMPRESSING = """  codes          one entry from each of M codebooks of K, summed; learnt (Shu & Nakayama, 2018)
  product-codes  chunks of the vector, each the nearest of those that k-means found
  svd            a low rank, in int8
  bits           rotated, then 0 to 8 bits a number by importance; mostly the best
  int8, int4     that many bits a number, however large the table becomes
All but the last two take as many bytes as --budget says, or as the codes of --codebooks × --entries do. A run has one
packed table: another compress replaces it. Only the vectors that the input looks up are packed; the output layer of a
language model still needs the map's table. Then: eval RUN --compressed."""
OF_ANY_SIZE = ("codes", "product-codes", "svd", "bits")
METHODS_OF = {"codebooks": OF_ANY_SIZE, "entries": OF_ANY_SIZE, "steps": ("codes",), "seed": ("codes",)}
"""The methods that each option applies to."""


def add_commands(command: Command) -> None:
    """The commands that prepare a run for use."""
    sub = command(
        "cache", _cache, "Write a run's finished vectors beside its weights, so that --cached inference needs no unit."
    )
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument("--dtype", default="fp32", choices=CACHE_DTYPES, help="of the vectors (default: fp32)")
    _add_shared(sub)

    sub = command(
        "compress", _compress, "Pack a run's finished vectors into few bytes beside its weights.", COMPRESSING
    )
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument(
        "--method",
        default="codes",
        choices=METHODS,
        help="how (default: codes, the published method; bits loses less and takes longer to look up)",
    )
    sub.add_argument("--budget", metavar="SIZE", help="bytes at most, as in 200KB, in place of --codebooks")
    sub.add_argument("--codebooks", type=int, metavar="M", help="codes of a token (default: 32)")
    sub.add_argument("--entries", type=int, metavar="K", help="of a codebook: 2, 4, 8 … 256 (default: 16)")
    sub.add_argument("--steps", type=int, help="of learning the codes, at most (default: 4000)")
    sub.add_argument("--seed", type=int, help="for the codes (default: 0)")
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

    how = _compression(options)
    run = load_run(options.folder, checkpoint=options.checkpoint, device=options.device)
    with work_bar(f"packing into {how}") as progress:
        made = run.compress(how, progress)
    if options.json:
        files = {str(file): one.to_dict() for file, one in made.items()}
        print_json({"run": str(options.folder), "files": files})
        return
    for file, one in made.items():
        print(
            f"{file}: {one.bytes:,} bytes as {one.method}, {one.finished_bytes / one.bytes:.1f} times smaller than the "
            f"finished vectors ({one.finished_bytes:,}) and {one.map_bytes / one.bytes:.1f} times than the map they "
            f"come from ({one.map_bytes:,})"
        )
        weighted = one.lost_by_frequency
        by_use = "" if weighted is None else f", {weighted:.2%} if tokens count as often as they occur"
        print(f"{one.lost:.2%} of the vectors' variance is lost{by_use}.")
    weights = "" if options.checkpoint == "best" else f" --checkpoint {options.checkpoint}"
    print(f"Measure what that costs: torchdefine eval {shlex.quote(options.folder)} --compressed{weights}")


def _compression(options: argparse.Namespace) -> Compression:
    """How to pack; an option that would have no effect is refused."""
    from torchdefine.adapt import Budget
    from torchdefine.inference import CodeLearning
    from torchdefine.inference.compress import Compression

    given = {name: getattr(options, name) for name in METHODS_OF if getattr(options, name) is not None}
    for name in given:
        if options.method not in METHODS_OF[name]:
            raise UserError(f"--{name} means nothing to the method {options.method}: leave it out.")
    if options.budget is not None and "codebooks" in given:
        raise UserError("--budget and --codebooks both say how large the codes are: give one of them.")
    if options.budget is not None and "entries" in given and options.method != "codes":
        raise UserError(f"--entries means nothing to the method {options.method} with a --budget: leave it out.")
    learning = CodeLearning(**{name: given.pop(name) for name in ("steps", "seed") if name in given})
    budget = None if options.budget is None else Budget.of(options.budget)
    if budget is not None and budget.floats_only:
        raise UserError(f"The budget {options.budget!r} counts parameters, not bytes: use 200KB, say.")
    return Compression(options.method, **given, learning=learning, budget=None if budget is None else budget.bytes)
