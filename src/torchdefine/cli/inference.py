"""Commands that make a model cheaper to use, and those that take it elsewhere."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torchdefine.cli.shared import CHECKPOINTS, Command, add_shared, bar, open_run, show, whole
from torchdefine.errors import UserError
from torchdefine.packing import METHODS

EXPORTING = """  A language model becomes its embedding and, for an LSTM or a Transformer-XL, the step from token to
  token; a translator its encoder and the step of its decoder. The folder holds them with weights, vocabulary,
  settings, export.json and a model card. Every program is compared with the model before the folder appears.
  A folder of transformers, as adapt writes it, becomes one ONNX program with its packed table; or, by the format
  transformers, a folder that loads without torchdefine for users who allow the code beside it."""

ADAPTING = """  By default, adapt makes one table, bits by importance: frequent and sensitive numbers get more bits.
  With --thorough it also tries low ranks, DeFINE and MLP units, and codes. It takes the best that fits, and distils it.
  The new folder holds the model with its tokenizer, a card (README.md), and adapt.json with every number. Write
  `import torchdefine.adapt.huggingface` before you load it with AutoModel."""

COMPRESSING = """
Without a --budget, int8 and int4 take what they need, codes what --codebooks × --entries come to, and all others as
much as codes of 32 × 16, but an eighth of the vectors at most. A run has one packed table: another compress replaces
it. Only the vectors that the input looks up are packed; the output layer of a language model still needs the map's
table. Then: eval RUN --compressed."""

STILL_THE_MODEL = 0.9
"""A cosine, or a share of equal predictions, from which on a smaller model does about what the old one did."""
OF_AN_EXPORT = ("folder", "out", "format", "license", "checkpoint", "cached", "compressed")
"""What means nothing to a check."""


def add_commands(command: Command) -> None:
    """The commands that prepare models for use."""
    summary = "Write the vectors of all tokens beside a run's weights, so that --cached inference needs no unit."
    option = command("cache", _cache, summary)
    add_shared(option, "folder")
    option("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"], help="of the vectors (default: fp32)")
    add_shared(option, "--checkpoint", "--device", "--json")

    summary = "Pack the vectors of all tokens into few bytes beside a run's weights."
    option = command("compress", _compress, summary, last=methods_help)
    add_shared(option, "folder")
    option("--method", default="bits", metavar="NAME", help="one of those below (default: bits)")
    option("--budget", metavar="SIZE", help="bytes at most, as in 200KB")
    option("--codebooks", type=whole, metavar="M", help="codes of a token (default: 32)")
    option("--entries", type=whole, metavar="K", help="of a codebook: 2, 4, 8 … 256 (default: 16)")
    option("--steps", type=whole, help="of training codes or a unit, at most (default: 4000 or 2000)")
    option("--seed", type=int, help="of that training (default: 0)")
    add_shared(option, "--checkpoint", "--device", "--json")

    summary = "Write a run as programs that run without torchdefine, with a card."
    option = command("export", _export, summary, EXPORTING)
    option("folder", metavar="RUN", nargs="?", help="a run's folder, or a model's that adapt wrote")
    formats = "needed: torch-export for .pt2 files that torch.export.load reads, onnx for onnxruntime; masked language "
    formats += "models also as transformers, or transformers-with-unit"
    option("--format", metavar="FORMAT", help=formats)
    option("--out", help="needed: the new folder")
    option("--license", metavar="TEXT", help="the licence to name in the card")
    option("--checkpoint", choices=CHECKPOINTS, help="which weights (default: best)")
    option("--check", metavar="FOLDER", help="check an export instead: its files, and that its programs run")
    add_shared(option, "--cached", "--compressed", "--json")

    summary = "Replace the token table of a Hugging Face model by a smaller one, and measure the cost."
    option = command("adapt", _adapt, summary, ADAPTING)
    option("folder", metavar="MODEL_DIR", help="a folder that save_pretrained wrote, with its tokenizer")
    option("--budget", required=True, help="for the table: 4MB, 512KiB, or '4M parameters' in float32")
    option("--text", required=True, help="a file of plain text like the text that the model will read")
    option("--out", required=True, help="the new model's folder")
    option("--pairs", metavar="FILE", help="measure on pairs too: lines of two texts and perhaps a score, with tabs")
    option("--labels", metavar="FILE", help="measure on labels too: lines of a text and a label, with a tab")
    explained = "keep: the tokenizer as it is (default); trim: only the tokens that the text uses, characters and "
    explained += "special tokens, so that other words have more tokens; auto: try both and take the better one"
    option("--vocabulary", choices=["keep", "trim", "auto"], default="keep", help=explained)
    rest = "int8: torchao stores the linear layers with 8 bits for each weight; keep: as they are (default)"
    option("--rest", choices=["keep", "int8"], default="keep", help=rest)
    thorough = "try all methods and distil the best: minutes; after a kill, the same command continues"
    option("--thorough", action="store_true", help=thorough)
    option("--distill", type=whole, default=200, help="steps of distillation with --thorough (default: 200; 0: none)")
    option("--choosing", type=whole, default=300, help="sentences to compare candidates on (default: 300)")
    option("--held-out", type=whole, default=500, help="sentences to measure the result on (default: 500)")
    option(
        "--trust-code",
        action="store_true",
        help="run Python code from the model's folder, which adapt never does otherwise",
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
    show(options, facts, (f"{file}: {size:,} bytes" for file, size in written.items()))


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
            f"{file}: {one.bytes:,} bytes as {one.label}, {of_vectors:.1f} times smaller than the vectors "
            f"({one.vectors_bytes:,}) and {of_map:.1f} times than the map they come from ({one.map_bytes:,})"
        )
        weighted = one.lost_by_frequency
        by_use = "" if weighted is None else f", {weighted:.2%} if tokens count as often as they occur"
        lines.append(f"{one.lost:.2%} of the vectors' variance is lost{by_use}.")
    weights = "" if options.checkpoint == "best" else f" --checkpoint {options.checkpoint}"
    lines.append(f"Measure what that costs: torchdefine eval {shlex.quote(options.folder)} --compressed{weights}")
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
        lines.append(f"{folder} is whole, and its programs run.")
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
        difference = f"largest difference to the model {program['largest_difference']:.1e}"
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
        apart = f"largest difference to the model {facts['largest_difference']:.1e}"
        line = f"{out / facts['file']}: {facts['bytes']:,} bytes, {apart}"
    else:
        from torchdefine.adapt.standalone import write_standalone

        facts = write_standalone(options.folder, out)
        line = f"{out}: {facts['bytes']:,} bytes; whoever loads it allows the code in {out / facts['code']}."
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
    if not options.json:
        for fitted in shrunk.fitted.values():
            fitted.print()
    before, after = (size / 1e6 for size in shrunk.file_bytes)
    found = "; ".join(f"{name} {measure}" for name, measure in shrunk.measures.items())
    lines = [
        str(shrunk.replacement),
        str(shrunk.vocabulary),
        f"On {shrunk.held_out:,} held-out sentences, against the old model, with 95 % intervals: {found}.",
    ]
    for name in ("cosine", "top-1 agreement", "agreement"):
        if name in shrunk.measures and shrunk.measures[name].value < STILL_THE_MODEL:
            lines.append(f"Warning: the {name} is low, so the new model differs much: allow more bytes.")
    lines.append(f"Weights {before:,.1f} → {after:,.1f} MB on disk, in {shrunk.seconds:,.0f} s.")
    lines.append(f"The model is in {shrunk.folder}. Write `import torchdefine.adapt.huggingface` before you load it.")
    show(options, shrunk.to_dict(), lines)


def _stage(what: str) -> Any:
    """A bar on a terminal, a line everywhere else."""
    if not sys.stderr.isatty():
        print(what, file=sys.stderr)
    return bar(what)
