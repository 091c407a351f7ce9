"""Commands that make a model cheaper to use, and those that take it elsewhere."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.cli.shared import CHECKPOINTS, Command, add_shared, bar, open_run, show, whole
from torchdefine.errors import UserError
from torchdefine.packing import METHODS

if TYPE_CHECKING:
    from torchdefine.adapt.shrink import Shrunk

EXPORTING = """  A language model becomes a program for its embedding. An LSTM or a Transformer-XL also becomes a
  program for one step of generation. A translator becomes an encoder and a step of its decoder. The folder also holds
  weights, vocabulary, settings, export.json and a model card. torchdefine first compares every program with the model.
  A model folder that adapt wrote becomes one ONNX program with the packed table. With --format transformers it becomes
  a folder that loads without torchdefine, by code that lies in the folder (trust_remote_code=True)."""

ADAPTING = """  adapt packs the table by one method, bits by importance: frequent tokens and sensitive directions get
  more bits. With --thorough it also tries low rank, DeFINE and MLP units, and codes, and distils the best table.
  The sentences of the text have three parts: one to fit tables, one to choose, one (held-out) to measure the result.
  The new folder holds the model, its tokenizer, README.md (how to load it, what it costs) and adapt.json (all numbers).
  Import torchdefine.adapt.huggingface in Python before you load the model."""

COMPRESSING = """
Sizes without --budget: int8 and int4 take what they need. codes take what --codebooks and --entries say. All other
methods take as much as 32 codebooks of 16 entries, but at most an eighth of the vectors. A run has one packed table:
another compress replaces it. Only the vectors of the input are packed. A tied output layer still needs its table.
Measure the cost: torchdefine eval RUN --compressed."""

STILL_THE_MODEL = 0.9
"""A cosine, or a share of equal predictions, from which on a smaller model does about what the old one did."""
OF_AN_EXPORT = ("folder", "out", "format", "license", "checkpoint", "cached", "compressed")
"""What means nothing to a check."""


def add_commands(command: Command) -> None:
    """The commands that prepare models for use."""
    summary = (
        "Compute the vectors of all tokens once and store them in the run, so that --cached inference needs no unit."
    )
    option = command("cache", _cache, summary)
    add_shared(option, "folder")
    option(
        "--dtype", default="fp32", choices=["fp32", "bf16", "fp16"], help="number format of the vectors (default: fp32)"
    )
    add_shared(option, "--checkpoint", "--device", "--json")

    summary = "Pack the vectors of all tokens into few bytes, and store them in the run."
    option = command("compress", _compress, summary, last=methods_help)
    add_shared(option, "folder")
    option("--method", default="bits", metavar="NAME", help="one of the methods below (default: bits)")
    option("--budget", metavar="SIZE", help="largest size of the packed vectors: 200KB, 1.5MB")
    option("--codebooks", type=whole, metavar="M", help="method codes: codes for each token (default: 32)")
    option(
        "--entries", type=whole, metavar="K", help="method codes: entries of a codebook: 2, 4, 8 … 256 (default: 16)"
    )
    option("--steps", type=whole, help="most training steps of codes (default: 4000) or of a unit (default: 2000)")
    option("--seed", type=int, help="random seed of that training (default: 0)")
    add_shared(option, "--checkpoint", "--device", "--json")

    summary = "Turn a run, or a model folder of transformers, into programs that run without torchdefine."
    option = command("export", _export, summary, EXPORTING)
    option("folder", metavar="RUN", nargs="?", help="a run, or a model folder that adapt or save_pretrained wrote")
    formats = (
        "required. torch-export: .pt2 files for torch.export.load; onnx: for onnxruntime; transformers: for model "
    )
    formats += "folders and masked language models; transformers-with-unit: for masked language models"
    option("--format", metavar="FORMAT", help=formats)
    option("--out", help="required: the new folder")
    option("--license", metavar="TEXT", help="the licence to name in the card")
    option("--checkpoint", choices=CHECKPOINTS, help="which weights (default: best)")
    option("--check", metavar="FOLDER", help="check an existing export instead: its files, and that its programs run")
    add_shared(option, "--cached", "--compressed", "--json")
    _add_adapt(command)


def _add_adapt(command: Command) -> None:
    summary = "Pack the token table of a Hugging Face model into few bytes, and measure what that costs."
    option = command("adapt", _adapt, summary, ADAPTING)
    option("folder", metavar="MODEL_DIR", help="a folder that save_pretrained wrote, with its tokenizer")
    option(
        "--budget", required=True, help="largest size of the new table: 4MB, 512KiB, or '4M parameters' (float32 only)"
    )
    option("--text", required=True, help="a file of plain text like the text that the model will read")
    option("--out", required=True, help="the folder of the new model")
    option(
        "--pairs",
        metavar="FILE",
        help="also measure on your pairs. Each line: two texts, perhaps a score; separated by tabs",
    )
    option(
        "--labels",
        metavar="FILE",
        help="also measure on your labels. Each line: a text and a label, separated by a tab",
    )
    explained = "keep: keep all tokens (default); trim: drop tokens that the text does not use, so that other words "
    explained += "are split into more tokens; auto: try both and take the better one"
    option("--vocabulary", choices=["keep", "trim", "auto"], default="keep", help=explained)
    rest = "keep: leave the other layers as they are (default); int8: torchao stores linear layers in 8 bits a weight"
    option("--rest", choices=["keep", "int8"], default="keep", help=rest)
    thorough = "try all methods and distil the best one (minutes). After a kill, run the same command again to go on"
    option("--thorough", action="store_true", help=thorough)
    option("--distill", type=whole, default=200, help="distillation steps with --thorough (default: 200; 0: none)")
    option("--choosing", type=whole, default=300, help="sentences for choosing among candidates (default: 300)")
    option(
        "--held-out",
        type=whole,
        default=500,
        help="sentences for measuring the result, used for nothing else (default: 500)",
    )
    option(
        "--trust-code",
        action="store_true",
        help="allow Python code in the model folder to run; otherwise adapt refuses such models",
    )
    add_shared(option, "--device", "--json")


def methods_help() -> str:
    listed = "\n".join(f"  {name:12} {entry.summary}" for name, entry in METHODS.items())
    return f"methods:\n{listed}\n{COMPRESSING}"


def _cache(options: argparse.Namespace, _: dict[str, Any]) -> None:
    run = open_run(options)
    with bar("computing vectors") as progress:
        written = run.cache(options.dtype, progress)
    facts = {"run": options.folder, "files": {str(file): size for file, size in written.items()}}
    lines = [f"{file}: {size:,} bytes" for file, size in written.items()]
    show(options, facts, [*lines, f"Use it: torchdefine eval {shlex.quote(options.folder)} --cached"])


def _compress(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.tables import Budget

    settings, budget = _settings(options), None if options.budget is None else Budget.of(options.budget)
    if budget is not None and budget.floats_only:
        raise UserError(f"The budget {options.budget!r} counts parameters, not bytes: use 200KB, say.")
    run = open_run(options)
    with bar(f"packing by {options.method}") as progress:
        made = run.compress(options.method, budget, progress=progress, **settings)
    lines = []
    for file, one in made.items():
        of_vectors, of_map = one.vectors_bytes / one.bytes, one.map_bytes / one.bytes
        lines.append(
            f"{file}: {one.bytes:,} bytes as {one.label}. The unpacked vectors take {one.vectors_bytes:,} bytes "
            f"({of_vectors:.1f} times as many), the map's table {one.map_bytes:,} ({of_map:.1f} times as many)."
        )
        weighted = one.lost_by_frequency
        by_use = "" if weighted is None else f"; weighted by how often tokens occur: {weighted:.2%}"
        lines.append(f"Variance of the vectors that is lost: {one.lost:.2%}{by_use}.")
    weights = "" if options.checkpoint == "best" else f" --checkpoint {options.checkpoint}"
    lines.append(f"Measure the cost: torchdefine eval {shlex.quote(options.folder)} --compressed{weights}")
    show(options, {"run": options.folder, "files": {str(file): one.to_dict() for file, one in made.items()}}, lines)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a method; an option that would have no effect is refused."""
    from torchdefine.tables import table_method

    method: Any = table_method(options.method)
    names = ("codebooks", "entries", "steps", "seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    known = {field.name for field in fields(method)}
    known |= {"steps", "seed"} if "training" in known else set()
    for name in given:
        if name not in known:
            raise UserError(f"--{name} means nothing to the method {options.method}: leave it out.")
    if options.budget is not None and "codebooks" in given:
        raise UserError("--budget and --codebooks both say how large the codes are: give one of them.")
    if training := {name: given.pop(name) for name in ("steps", "seed") if name in given}:
        given["training"] = replace(method.training, **training)
    return given


def _export(options: argparse.Namespace, _: dict[str, Any]) -> None:
    lines = []
    if options.check is not None:
        if any(getattr(options, name) for name in OF_AN_EXPORT):
            raise UserError("--check takes the folder of an export and nothing else: leave all other options out.")
        from torchdefine.export import check_export

        folder, facts = Path(options.check), check_export(options.check).facts
        lines.append(f"{folder} is complete, and its programs run.")
    elif options.folder and options.out and options.format:
        from torchdefine.adapt.model_folder import is_model_folder
        from torchdefine.files import check_new_folder

        check_new_folder(options.out)
        if is_model_folder(Path(options.folder)):
            return _export_model(options)
        options.device, options.checkpoint = "cpu", options.checkpoint or "best"
        folder, run = Path(options.out), open_run(options)
        with bar("exporting") as progress:
            facts = run.export(folder, options.format, license=options.license, progress=progress)
    else:
        raise UserError("An export needs a run and two options: torchdefine export RUN --format FORMAT --out FOLDER.")
    for program in facts["programs"].values():
        size = sum(file["bytes"] for name, file in facts["files"].items() if name.startswith(program["file"]))
        difference = f"largest difference from the model {program['largest_difference']:.1e}"
        lines.append(f"{folder / program['file']}: {size:,} bytes, {difference}")
    show(options, {"folder": str(folder), **facts}, [*lines, f"The card is {folder / 'README.md'}."])


def _export_model(options: argparse.Namespace) -> None:
    """A model of transformers, with a packed table or its own."""
    of_a_run = (options.license, options.checkpoint, options.cached, options.compressed)
    if options.format not in ("onnx", "transformers") or any(of_a_run):
        written = "torchdefine export MODEL_DIR --format onnx --out FOLDER"
        raise UserError(f"A model of transformers becomes onnx or, with code beside it, transformers: {written}.")
    out = Path(options.out)
    if options.format == "onnx":
        from torchdefine.adapt.onnx_folder import export_onnx

        with bar("exporting"):
            facts = export_onnx(options.folder, out)
        apart = f"largest difference from the model {facts['largest_difference']:.1e}"
        line = f"{out / facts['file']}: {facts['bytes']:,} bytes, {apart}"
    else:
        from torchdefine.adapt.standalone import write_standalone

        facts = write_standalone(options.folder, out)
        line = f"{out}: {facts['bytes']:,} bytes. Loading it runs the code in {out / facts['code']}: read it first."
    show(options, {"folder": options.out, **facts}, [line, f"The card is {out / 'README.md'}."])


def _adapt(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.adapt.huggingface import transformers
    from torchdefine.adapt.shrink import ShrinkOptions, shrink_model
    from torchdefine.training.distributed import Processes

    their_log = transformers.logging  # its bars and notes would mix with ours
    their_log.set_verbosity_error()
    their_log.disable_progress_bar()
    sizes = {"choosing": options.choosing, "held_out": options.held_out, "distill_steps": options.distill}
    asked = {
        "thorough": options.thorough,
        "rest": options.rest,
        "trust_code": options.trust_code,
        "vocabulary": options.vocabulary,
    }
    settings = ShrinkOptions(**sizes, **asked, device=str(Processes().device(options.device)))
    examples = {"pairs": options.pairs, "labels": options.labels}
    given = (options.folder, options.text, options.out, options.budget)
    shrunk = shrink_model(*given, **examples, options=settings, stage=_stage)
    for name, fitted in shrunk.fitted.items():
        if len(fitted.measured) > 1 and not options.json:
            print(f"Candidates for {name}, compared on sentences for choosing. The held-out sentences follow below.")
            fitted.print()
            print()
    show(options, shrunk.to_dict(), _of_the_shrunk(shrunk))


def _of_the_shrunk(shrunk: Shrunk) -> Iterator[str]:
    from torchdefine.adapt.measures import explained
    from torchdefine.adapt.model_folder import loading_code
    from torchdefine.tables.budget import readable_bytes

    before, after = map(readable_bytes, shrunk.file_bytes)
    yield str(shrunk.replacement)
    yield from (f"Method: {one.why}" for one in shrunk.fitted.values() if len(one.measured) == 1)
    yield str(shrunk.vocabulary)
    yield f"Weights on disk: {before} → {after}."
    yield f"Compared with the old model on {shrunk.held_out:,} held-out sentences, with 95 % intervals:"
    yield from (f"  {line}" for line in explained(shrunk.measures))
    for name in ("cosine", "top-1 agreement", "agreement"):
        if name in shrunk.measures and shrunk.measures[name].value < STILL_THE_MODEL:
            yield f"Warning: the {name} is low. The new model differs much from the old one: allow more bytes."
    yield f"The model is in {shrunk.folder} ({shrunk.seconds:,.0f} seconds). Load it in Python:"
    yield from (f"  {line}" for line in loading_code(shrunk.folder, str(shrunk.folder)).splitlines() if line)


def _stage(what: str) -> Any:
    """A bar on a terminal, a line everywhere else."""
    if not sys.stderr.isatty():
        print(what, file=sys.stderr)
    return bar(what)
