"""An export opened again: its files are checked, and its programs run by the names of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchdefine.data import Tokenization, TokenizerPair, load_tokenization
from torchdefine.errors import UserError
from torchdefine.export.check import CHECKED_AT, wrong_outputs
from torchdefine.export.formats import ProgramFormat, Runner, program_format
from torchdefine.export.program import Port, sampled
from torchdefine.export.write import CARD_FILE, FACTS_FILE, FORMAT, FORMAT_VERSION
from torchdefine.files import read_json, sha256_of

EXPORT_AGAIN = "export the run again"


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
    folder = Path(folder)
    facts = _read_facts(folder)
    try:
        if not facts["programs"]:
            raise ValueError("no programs")
        _check_files(folder, facts["files"])
        tokenization = TokenizerPair.load(folder) if facts["vocabulary"]["pair"] else load_tokenization(folder)
        kind = program_format(facts["program_format"])
        kind.check_installed()
        files, programs = facts["files"], {}
        for name, program in facts["programs"].items():
            inputs, outputs = (tuple(map(Port.from_dict, program[side])) for side in ("inputs", "outputs"))
            files[program["file"]]  # else its hash was not compared
            programs[name] = LoadedProgram(name, inputs, outputs, _open(folder / program["file"], inputs, kind))
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / FACTS_FILE} is damaged ({error!r}): {EXPORT_AGAIN}.") from None
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
                wrong = f"an error ({' '.join(str(error).split())[:200]})"
            if wrong:
                raise UserError(f"The program {name} in {folder} gives {wrong}: {EXPORT_AGAIN}.")
    return export


def _read_facts(folder: Path) -> dict[str, Any]:
    if not (folder / FACTS_FILE).is_file():
        raise UserError(f"{folder} holds no export: {FACTS_FILE} is missing.")
    facts = read_json(folder / FACTS_FILE)
    if facts.get("format") != FORMAT:
        raise UserError(f"{folder / FACTS_FILE} is not of an export: {EXPORT_AGAIN}.")
    if facts.get("version") != FORMAT_VERSION:
        raise UserError(
            f"{folder} is an export of format version {facts.get('version')}; this torchdefine reads {FORMAT_VERSION}."
        )
    return facts


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
            raise UserError(f"{folder / name} was cut short, to {size:,} of {file['bytes']:,} bytes: {EXPORT_AGAIN}.")
        if sha256_of(folder / name) != file["sha256"]:
            raise UserError(f"{folder / name} is not the file that was exported: {EXPORT_AGAIN}.")


def _open(path: Path, inputs: Sequence[Port], kind: ProgramFormat) -> Runner:
    try:
        return kind.open(path, inputs)
    except Exception as error:  # of whatever kind: torch and onnxruntime have many
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be opened here ({reason}): {EXPORT_AGAIN}.") from None
