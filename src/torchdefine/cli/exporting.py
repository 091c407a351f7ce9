"""The command that exports a run for use without torchdefine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torchdefine.cli.shared import CHECKPOINTS, Command, add_cached, loading, print_json
from torchdefine.errors import UserError

EXPORTING = """  A language model becomes its embedding and, for an LSTM or a Transformer-XL, the step from token to
  token; a translator its encoder and the step of its decoder. The folder holds them with weights, vocabulary,
  settings, export.json and a model card. Every program is compared with the model before the folder appears."""

OF_AN_EXPORT = ("folder", "out", "format", "license", "checkpoint", "cached", "compressed")
"""What means nothing to a check."""


def add_commands(command: Command) -> None:
    """The command that exports."""
    sub = command("export", _export, "Write a run as programs that run without torchdefine, with a card.", EXPORTING)
    sub.add_argument("folder", metavar="RUN", nargs="?", help="a run's folder")
    sub.add_argument(
        "--format",
        choices=["torch-export", "onnx"],
        help="needed: torch-export for .pt2 files that torch.export.load reads, onnx for onnxruntime",
    )
    sub.add_argument("--out", help="needed: the new folder")
    sub.add_argument("--license", metavar="TEXT", help="the licence to name in the card")
    sub.add_argument("--checkpoint", choices=CHECKPOINTS, help="which weights (default: best)")
    add_cached(sub)
    sub.add_argument("--check", metavar="FOLDER", help="check an export instead: its files, and that its programs run")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _export(options: argparse.Namespace, _: dict[str, Any]) -> None:
    if options.check is not None:
        if any(getattr(options, name) for name in OF_AN_EXPORT):
            raise UserError("--check takes the folder of an export and nothing else: leave all other options out.")
        _check(options)
        return
    if not (options.folder and options.out and options.format):
        raise UserError("An export needs a run and two options: torchdefine export RUN --format FORMAT --out FOLDER.")
    from torchdefine.files import check_new_folder
    from torchdefine.run import load_run
    from torchdefine.training.progress import work_bar

    check_new_folder(options.out)
    options.device, options.checkpoint = "cpu", options.checkpoint or "best"
    run = load_run(options.folder, **loading(options))
    with work_bar("exporting") as progress:
        facts = run.export(options.out, options.format, license=options.license, progress=progress)
    _show(Path(options.out), facts, options.json)


def _check(options: argparse.Namespace) -> None:
    from torchdefine.export import check_export

    facts = check_export(options.check).facts
    if not options.json:
        print(f"{options.check} is whole, and its programs run.")
    _show(Path(options.check), facts, options.json)


def _show(folder: Path, facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(folder), **facts})
        return
    for program in facts["programs"].values():
        size = sum(file["bytes"] for name, file in facts["files"].items() if name.startswith(program["file"]))
        print(
            f"{folder / program['file']}: {size:,} bytes, largest difference to the model "
            f"{program['largest_difference']:.1e}"
        )
    print(f"The card is {folder / 'README.md'}.")
