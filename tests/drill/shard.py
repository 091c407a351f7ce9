"""A part of a drill in a process of its own: python -m tests.drill.shard ROOM PART SEED NUMBER COUNT FILE."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.drill.artefacts import drill_artefacts, drill_exports
from tests.drill.disks import drill_full_disks, drill_read_only_disks
from tests.drill.inputs import drill_commands, drill_paths, drill_recipes
from tests.drill.mutations import drill_mutations
from tests.drill.processes import drill_killed_encoding, drill_killed_saving, drill_killed_training, drill_limits
from tests.drill.room import Room
from tests.drill.watch import Watch

MOUNTING, EXPORTING = "the right to mount a disk", "a torch that can export"
Drill = Callable[[Room, Path, str, int], Watch]


@dataclass(frozen=True)
class Part:
    run: Drill
    """Takes what all share, an empty folder, a seed and the number of cases."""
    counted_by: str
    """The option that says how many cases there are."""
    fraction: float
    """Of that number."""
    at_once: int
    """Cases of a process."""
    needs: str = ""
    """Without which it is not run."""


PARTS: dict[str, Part] = {
    "killed trainings": Part(drill_killed_training, "kills", 0.5, 3),
    "killed saves": Part(drill_killed_saving, "kills", 0.25, 5),
    "killed encodings": Part(drill_killed_encoding, "kills", 0.25, 5),
    "limits": Part(drill_limits, "limits", 1, 6),
    "full disks": Part(drill_full_disks, "disks", 0.5, 10, MOUNTING),
    "read-only disks": Part(drill_read_only_disks, "disks", 0.5, 10, MOUNTING),
    "mutated runs": Part(lambda room, *rest: drill_mutations(room.run, room.other, *rest), "mutations", 1, 50),
    "mutated texts, embeddings, tables": Part(
        lambda room, *rest: drill_artefacts(room.run, room.corpus, *rest), "mutations", 1 / 3, 50
    ),
    "mutated exports": Part(
        lambda room, *rest: drill_exports(room.export, room.other, *rest), "mutations", 1 / 5, 20, EXPORTING
    ),
    "recipes": Part(lambda room, *rest: drill_recipes(*rest), "inputs", 0.7, 500),
    "command lines": Part(drill_commands, "inputs", 0.3, 300),
    "paths": Part(drill_paths, "inputs", 0.1, 100),
}
"""The longest first."""


def main(room: str, name: str, seed: str, number: str, count: str, file: str) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=room) as folder:
        os.environ["TORCHDEFINE_CACHE"] = f"{folder}/cache"
        watch = PARTS[name].run(Room(Path(room)), Path(folder), f"{seed}, {name}, {number}", int(count))
    Path(file).write_text(json.dumps(watch.facts()))


if __name__ == "__main__":
    main(*sys.argv[1:])
