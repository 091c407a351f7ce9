"""What a table, a method and a packed table are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdefine.adapt import Behaviour, Distillation
from torchdefine.adapt.measures import Measure
from torchdefine.tables.source import Source


@dataclass(frozen=True)
class Packed:
    """A table after a round trip through few bytes."""

    matrix: Tensor
    bytes: int
    """What codes, scales, codebooks and projections take; a file's header is extra."""
    label: str = ""
    """The sizes that were chosen."""
    kept: Tensor | None = None
    """The numbers of the rows in ``matrix``, where others are gone."""


class Table(ABC):
    """A table that methods pack, and how the result is judged."""

    source: Source
    facts: dict[str, Any]
    """Where it is from and what it is judged on; rows of other facts do not compare."""
    sizes: Sequence[int]
    """The budgets, in bytes."""
    teacher: Behaviour | None = None
    """A model on text that no measure uses, from which a packed table may learn."""
    learning = Distillation()
    may_lose_rows = True

    @abstractmethod
    def judge(self, packed: Packed) -> tuple[dict[str, Measure], dict[str, Any]]:
        """The measures, and what else is to be said of this row."""

    def frequent(self, room: int) -> Tensor:
        """The numbers of the ``room`` most frequent rows, or of the first ones without counts."""
        counts = torch.zeros(len(self.source.matrix)) if self.source.counts is None else self.source.counts
        return torch.as_tensor(counts).argsort(descending=True, stable=True)[:room]


@dataclass(frozen=True)
class Method:
    """A way of packing tables. Its file's name is that of its results."""

    title: str
    pack: Callable[[Table, int], Packed | None]
    """Packs a table into a number of bytes; None if nothing fits."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What somebody needs to do it again."""
    packages: Sequence[str] = ()
    """Those that it needs; their versions stand in the result."""
    sizes: Callable[[Table], Sequence[int]] | None = None
    """Of a method that has sizes of its own, in place of the table's."""
    suits: Callable[[Table], bool] = lambda table: True


@dataclass(frozen=True)
class Place:
    """A table that can be opened if some files are there."""

    needs: Mapping[str, str]
    """Names in the folder of inputs, perhaps with ``*``, and how to come by each."""
    open: Callable[..., Table]
    """Called with a path for each of them."""

    def paths(self, inputs: Path) -> list[Path | None]:
        return [next(iter(sorted(inputs.glob(name))), None) for name in self.needs]
