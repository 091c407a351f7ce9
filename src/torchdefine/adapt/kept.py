"""Work that survives the process: candidates as they were measured, and a distillation as far as it came."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdefine.adapt.fitted import Measured, Skipped
from torchdefine.errors import UserError
from torchdefine.files import read_sealed, write_sealed
from torchdefine.sealed_tensors import reading_safetensors, write_safetensors
from torchdefine.tables import CompactTable, load_table

FACTS, DISTILLED = "work.json", "distilled.safetensors"
_REMOVE = "remove it, and start again"


class Kept:
    """A folder of finished work. What it holds must belong to the same ``facts``, which say what the work is for."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        if (folder / FACTS).exists():
            if read_sealed(folder / FACTS, _REMOVE) != {"facts": dict(facts)}:
                raise UserError(f"{folder} holds unfinished work of other settings, text or model: {_REMOVE}.")
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(folder / FACTS, {"facts": dict(facts)})

    def candidate(self, index: int) -> Measured | Skipped | None:
        """What came of a candidate, if it was finished."""
        path = self._outcome(index)
        if not path.exists():
            return None
        known = read_sealed(path, _REMOVE)
        return Skipped(**known["skipped"]) if "skipped" in known else Measured(**known["measured"])

    def table(self, index: int) -> CompactTable:
        return load_table(self._table(index))

    def keep(self, index: int, outcome: Measured | Skipped, table: CompactTable | None = None) -> None:
        """The table first, so that an outcome stands for a whole one."""
        if table is not None:
            table.save(self._table(index))
        kind = "skipped" if isinstance(outcome, Skipped) else "measured"
        write_sealed(self._outcome(index), {kind: asdict(outcome)})

    def _table(self, index: int) -> Path:
        return self.folder / f"{index:02d}.safetensors"

    def _outcome(self, index: int) -> Path:
        return self.folder / f"{index:02d}.json"

    def keep_steps(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        write_safetensors(self.folder / DISTILLED, tensors, {"steps": str(steps)})

    def steps(self) -> tuple[dict[str, Tensor], int]:
        """What a distillation was when it was kept last, and after how many steps: none at first."""
        path = self.folder / DISTILLED
        if not path.exists():
            return {}, 0
        with reading_safetensors(path, if_missing=_REMOVE, if_damaged=_REMOVE) as file:
            return {name: tensor.clone() for name, tensor in file.read().items()}, int(file.metadata["steps"])

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def stored_steps(optimizer: torch.optim.Optimizer, cosines: list[Tensor]) -> dict[str, Tensor]:
    """All that later steps depend on, and the cosines so far."""
    found = {"cosines": torch.stack(cosines).cpu()}
    for index, group in enumerate(optimizer.param_groups):
        (part,) = group["params"]
        found[f"{index}.part"] = part.detach()
        found |= {f"{index}.{name}": torch.as_tensor(value) for name, value in optimizer.state[part].items()}
    return found


def restore_steps(optimizer: torch.optim.Optimizer, found: Mapping[str, Tensor]) -> list[Tensor]:
    """Undo ``stored_steps``; the cosines."""
    for index, group in enumerate(optimizer.param_groups):
        (part,) = group["params"]
        own = {name.partition(".")[2]: value for name, value in found.items() if name.startswith(f"{index}.")}
        part.data.copy_(own.pop("part"))
        optimizer.state[part] = {name: value.to(part.device) if value.dim() else value for name, value in own.items()}
    return list(found["cosines"].to(part.device).unbind())
