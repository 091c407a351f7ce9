"""A trained model as a folder of programs that run without torchdefine, each checked against the model; read again.

The folder holds the programs, ``model.safetensors``, the vocabulary, ``config.yaml``, ``export.json`` with all that a
program must know, and ``README.md``, the model card. It appears whole or not at all.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import torchdefine
from torchdefine.data import Tokenization, TokenizerPair, load_tokenization
from torchdefine.errors import MachineError, UserError, in_a_line
from torchdefine.export.card import ExportedFrom, model_card
from torchdefine.export.formats import ProgramFormat, check_torch, program_format, trace
from torchdefine.export.program import (
    CHECKED_AT,
    TOLERANCE,
    Exportable,
    Port,
    Program,
    Runner,
    difference_to_model,
    sampled,
    wrong_outputs,
)
from torchdefine.files import (
    Progress,
    check_path,
    new_folder,
    read_json,
    read_sealed,
    sha256_of,
    write_sealed,
    write_text,
)
from torchdefine.output.full import compared_with
from torchdefine.sealed_tensors import write_safetensors

FORMAT = "torchdefine export"
FORMAT_VERSION = 1
FACTS_FILE, WEIGHTS_FILE, CONFIG_FILE, CARD_FILE = "export.json", "model.safetensors", "config.yaml", "README.md"
EXPORT_AGAIN = "export the run again"

Model = TypeVar("Model", bound=nn.Module)


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
        written = {}
        for done, program in enumerate(exportable.programs, start=1):
            written[program.name] = _write_program(program, kind, making)
            if progress is not None:
                progress(done, len(exportable.programs))
        metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "vocabulary_sha256": tokenization.sha256}
        write_safetensors(making / WEIGHTS_FILE, exportable.model.state_dict(), metadata)
        tokenization.save(making)
        write_text(making / CONFIG_FILE, about.config)
        pair = isinstance(tokenization, TokenizerPair)
        ours = {"torchdefine": torchdefine.__version__, "python": platform.python_version(), "torch": torch.__version__}
        facts = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "task": about.task,
            "program_format": format,
            "name": about.name,
            "checkpoint": about.checkpoint,
            "vocabulary": {"size": len(tokenization), "sha256": tokenization.sha256, "pair": pair},
            "tolerance": TOLERANCE,
            "programs": written,
            "versions": {**ours, **{package: version(package) for package in kind.packages}},
            "files": file_facts(making),
        }
        write_sealed(making / FACTS_FILE, facts)
        write_text(making / CARD_FILE, model_card(exportable, tokenization, about, kind, written))
    return facts


def _write_program(program: Program, kind: ProgramFormat, folder: Path) -> dict[str, Any]:
    path = folder / f"{program.name}{kind.suffix}"
    try:
        kind.write(program, trace(program), path)
        largest = difference_to_model(program, kind.open(path, program.inputs))
    except (OSError, MemoryError, MachineError):
        raise
    except Exception as error:  # tracers and exporters raise many kinds
        reason = in_a_line(error)
        raise MachineError(f"The {program.name} could not be exported ({reason}): try the other format.") from error
    if not largest <= TOLERANCE:
        raise MachineError(
            f"The exported {program.name} differs from the model by {largest:.1e}, more than {TOLERANCE:.0e}, so "
            "nothing was written: try the other format."
        )
    ports = {"inputs": program.inputs, "outputs": program.outputs}
    described = {side: [port.to_dict() for port in of_side] for side, of_side in ports.items()}
    return {"file": path.name, "summary": program.summary, **described, "largest_difference": largest}


def file_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file in a folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files}


def on_the_cpu(model: Model) -> Model:
    """The model itself if it is ready to be traced, else a copy that is.

    An output layer that compares with finished vectors finds them in a table, in which the input looks them up too: a
    program would compute all of them in every call.
    """
    ready = not model.training and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
    if ready and all(embedding.looked_up is not None for embedding in compared_with(model)):
        return model
    made = copy.deepcopy(model).float().cpu().eval()
    for embedding in compared_with(made):
        if embedding.looked_up is None:
            embedding.look_up(embedding.table())
    return made


@dataclass(frozen=True)
class LoadedProgram:
    """A program of an export: called with its inputs by name, on the CPU, it gives its outputs by name."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    runner: Runner

    def __call__(self, **tensors: Tensor) -> dict[str, Tensor]:
        names = [port.name for port in self.inputs]
        if set(tensors) != set(names):
            raise UserError(f"The program {self.name} takes {', '.join(names)}, not {', '.join(tensors) or 'nothing'}.")
        found = self.runner([tensors[name] for name in names])
        return {port.name: tensor for port, tensor in zip(self.outputs, found, strict=True)}


@dataclass(frozen=True)
class LoadedExport:
    """What ``load_export`` gives."""

    folder: Path
    facts: dict[str, Any]
    """What ``export.json`` says."""
    tokenization: Tokenization | TokenizerPair
    programs: dict[str, LoadedProgram]


def load_export(folder: str | Path) -> LoadedExport:
    """Open what an export wrote; files that are missing, damaged or of another vocabulary are refused."""
    folder = check_path(folder)
    path = folder / FACTS_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not an export: {FACTS_FILE} is missing.")
    facts = read_json(path)
    if facts.get("format") != FORMAT:
        raise UserError(f"{path} does not belong to an export: {EXPORT_AGAIN}.")
    if facts.get("version") != FORMAT_VERSION:
        found = facts.get("version")
        raise UserError(f"{folder} is an export of format version {found}; this torchdefine reads {FORMAT_VERSION}.")
    facts = read_sealed(path, EXPORT_AGAIN)
    try:
        if not facts["programs"]:
            raise ValueError("no programs")
        _check_files(folder, facts["files"])
        tokenization = TokenizerPair.load(folder) if facts["vocabulary"]["pair"] else load_tokenization(folder)
        kind = program_format(facts["program_format"])
        kind.check_installed()
        programs = {name: _open(folder, name, kind, facts) for name in facts["programs"]}
    except UserError:  # a ValueError
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error!r}): {EXPORT_AGAIN}.") from None
    return LoadedExport(folder, facts, tokenization, programs)


def check_export(folder: str | Path) -> LoadedExport:
    """Open an export and run each of its programs at several sizes; their outputs must be as declared."""
    export = load_export(folder)
    for name, program in export.programs.items():
        for seed, sizes in enumerate(CHECKED_AT):
            try:
                found = program.runner(sampled(program.inputs, sizes, seed))
                wrong = wrong_outputs(found, program.outputs, sizes)
            except Exception as error:  # of whatever kind: torch and onnxruntime have many
                wrong = f"an error ({in_a_line(error)})"
            if wrong:
                raise UserError(f"The program {name} in {folder} gives {wrong}: {EXPORT_AGAIN}.")
    return export


def _check_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Check that every file is there, whole and as it was written."""
    if any(Path(name).name != name for name in files):
        raise ValueError("files outside the folder")
    for name in (*files, CARD_FILE):  # the card may be edited, so it has no hash
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: {EXPORT_AGAIN}.")
    for name, file in files.items():
        size = (folder / name).stat().st_size
        if size < file["bytes"]:
            raise UserError(f"{folder / name} was cut short ({size:,} of {file['bytes']:,} bytes): {EXPORT_AGAIN}.")
        if sha256_of(folder / name) != file["sha256"]:
            raise UserError(f"{folder / name} is not the file that was exported: {EXPORT_AGAIN}.")


def _open(folder: Path, name: str, kind: ProgramFormat, facts: Mapping[str, Any]) -> LoadedProgram:
    program = facts["programs"][name]
    inputs, outputs = (tuple(map(Port.from_dict, program[side])) for side in ("inputs", "outputs"))
    path = folder / program["file"]
    if program["file"] not in facts["files"]:
        raise ValueError("a program whose hash was not compared")
    try:
        return LoadedProgram(name, inputs, outputs, kind.open(path, inputs))
    except Exception as error:  # of whatever kind: torch and onnxruntime have many
        raise UserError(f"{path} cannot be opened here ({in_a_line(error)}): {EXPORT_AGAIN}.") from None
