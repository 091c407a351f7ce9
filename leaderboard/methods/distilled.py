"""What `torchdefine adapt --thorough` makes of it: the same, then distilled on text that no measure uses."""

from __future__ import annotations

from dataclasses import asdict

from leaderboard.board import Method, Packed, Table
from leaderboard.methods._ours import unpacked
from torchdefine.adapt import Distillation, distill
from torchdefine.errors import UserError
from torchdefine.tables import transform_table
from torchdefine.training.progress import work_bar


def pack(table: Table, budget: int) -> Packed | None:
    assert table.teacher is not None
    try:
        packed = transform_table(table.source, budget)
    except UserError:  # too few bytes
        return None
    with work_bar("distilling") as report:
        distill(table.teacher, packed, table.learning, report)
    return unpacked(packed)


METHOD = Method(
    "bits by importance, distilled",
    pack,
    {"torchdefine method": "bits", "distillation": asdict(Distillation())},
    suits=lambda table: table.teacher is not None,
)
