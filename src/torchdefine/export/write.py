"""A trained model as a folder of programs that run without torchdefine, each checked against the model.

The folder holds the programs, ``model.safetensors``, the vocabulary, ``config.yaml``, ``export.json`` with all that a
program must know, and ``README.md``, the model card. It appears whole or not at all.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import torchdefine
from torchdefine.data import Tokenization, TokenizerPair
from torchdefine.errors import MachineError
from torchdefine.export.card import model_card
from torchdefine.export.check import TOLERANCE, WrittenProgram, difference_to_model
from torchdefine.export.formats import ProgramFormat, check_torch, program_format, trace
from torchdefine.export.program import Exportable, Program
from torchdefine.files import Progress, new_folder, sha256_of, write_json, write_safetensors, write_text

FORMAT = "torchdefine export"
FORMAT_VERSION = 1
FACTS_FILE, WEIGHTS_FILE, CONFIG_FILE, CARD_FILE = "export.json", "model.safetensors", "config.yaml", "README.md"

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ExportedFrom:
    """What an export says about the run that it was made from."""

    name: str
    description: str
    task: str
    config: str
    """The run's settings as YAML."""
    checkpoint: str
    """Which weights these are: best, last or average."""
    result: Mapping[str, Any] | None
    """What result.json says, if the run has finished."""
    corpus: str
    data_licence: str | None
    """A sentence on the licence of the text, where it is known."""
    licence: str | None = None
    """The licence that the exporting user names."""


def export_model(
    exportable: Exportable,
    tokenization: Tokenization | TokenizerPair,
    about: ExportedFrom,
    folder: str | Path,
    format: str = "torch-export",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Export a model into a new folder; returns the contents of ``export.json``.

    Every program is opened again and compared with the model at several sizes. One that is further from it than
    ``TOLERANCE`` is a MachineError, and no folder is left.
    """
    kind = program_format(format)
    check_torch()
    kind.check_installed()
    with new_folder(folder) as making:
        written = _write_programs(exportable.programs, kind, making, progress)
        metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "vocabulary_sha256": tokenization.sha256}
        write_safetensors(making / WEIGHTS_FILE, exportable.model.state_dict(), metadata)
        tokenization.save(making)
        write_text(making / CONFIG_FILE, about.config)
        facts = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "task": about.task,
            "program_format": format,
            "name": about.name,
            "checkpoint": about.checkpoint,
            "vocabulary": {
                "size": len(tokenization),
                "sha256": tokenization.sha256,
                "pair": isinstance(tokenization, TokenizerPair),
            },
            "tolerance": TOLERANCE,
            "programs": {one.program.name: one.to_dict() for one in written},
            "versions": _versions(kind),
            "files": file_facts(making),
        }
        write_json(making / FACTS_FILE, facts)
        write_text(making / CARD_FILE, model_card(exportable, tokenization, about, kind, written))
    return facts


def file_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file in a folder."""
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def on_the_cpu(model: Model) -> Model:
    """The model itself if it is ready to be traced, else a copy that is."""
    if not model.training and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters()):
        return model
    return copy.deepcopy(model).float().cpu().eval()


def _write_programs(
    programs: Sequence[Program], kind: ProgramFormat, folder: Path, progress: Progress | None
) -> list[WrittenProgram]:
    written = []
    for done, program in enumerate(programs, start=1):
        file = f"{program.name}{kind.suffix}"
        try:
            kind.write(program, trace(program), folder / file)
            one = WrittenProgram(program, file, difference_to_model(program, kind.open(folder / file, program.inputs)))
        except (OSError, MemoryError, MachineError):
            raise
        except Exception as error:  # tracers and exporters raise many kinds
            reason = " ".join(str(error).split())[:200]
            raise MachineError(f"The {program.name} could not be exported ({reason}): try the other format.") from error
        if not one.largest_difference <= TOLERANCE:
            raise MachineError(
                f"The exported {program.name} differs from the model by {one.largest_difference:.1e}, more than "
                f"{TOLERANCE:.0e}, so nothing was written: try the other format."
            )
        written.append(one)
        if progress is not None:
            progress(done, len(programs))
    return written


def _versions(kind: ProgramFormat) -> dict[str, str]:
    ours = {"torchdefine": torchdefine.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**ours, **{package: version(package) for package in kind.packages}}
