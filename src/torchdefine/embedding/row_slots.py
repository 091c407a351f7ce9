"""Which rows of a table lie in which slots of a cache, and which slots may be given away."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchdefine.errors import UserError

Places = npt.NDArray[np.int64]
SMALLEST_WINDOW = 1024


class Placed(NamedTuple):
    """Where rows lie, and what has to be moved before they do."""

    slots: Places
    """Of each row that was asked for."""
    new_rows: Places
    new_slots: Places
    old_rows: Places
    """Rows that lose their slots, which ``old_slots`` names, to new ones."""
    old_slots: Places


class RowSlots:
    """The slots of a cache. A pinned slot keeps its row; others go by second chance, those in use for long staying."""

    def __init__(self, rows: int, slots: int) -> None:
        self.slot_of = np.full(rows, -1, np.int32)
        self.row_of = np.full(slots, -1, np.int64)
        self.pins = np.zeros(slots, np.int32)
        self._used = np.zeros(slots, bool)
        """Since the hand passed."""
        self._hand = 0

    def clear(self) -> None:
        self.slot_of.fill(-1)
        self.row_of.fill(-1)
        self.pins.fill(0)

    def held(self) -> tuple[Places, Places]:
        """All slots that have a row, and these rows."""
        slots = np.flatnonzero(self.row_of >= 0)
        return slots, self.row_of[slots]

    def place(self, rows: Places) -> Placed:
        """Find or make room for rows, all different, and pin their slots."""
        slots = self.slot_of[rows].astype(np.int64)
        there = slots >= 0
        self.pins[slots[there]] += 1
        new_rows, new_slots = rows[~there], self._given_away(int((~there).sum()))
        if len(new_slots) < len(new_rows):
            self.unpin(np.concatenate((slots[there], new_slots)))
            raise UserError(
                f"{len(rows):,} different rows do not fit a cache of {len(self.row_of):,}, which also keeps those of "
                "batches whose step is still to come: use more cache_rows, or smaller batches."
            )
        self._used[slots[there]] = True
        old_rows = self.row_of[new_slots]
        held = old_rows >= 0
        self.slot_of[old_rows[held]] = -1
        self.row_of[new_slots], self.slot_of[new_rows] = new_rows, new_slots
        slots[~there] = new_slots
        return Placed(slots, new_rows, new_slots, old_rows[held], new_slots[held])

    def unpin(self, slots: Places) -> None:
        self.pins[slots] -= 1

    def _given_away(self, count: int) -> Places:
        """So many slots, pinned, or as many as there are: the hand goes round at most twice."""
        total, passed, found = len(self.row_of), 0, [np.empty(0, np.int64)]
        while count and passed < 2 * total:
            window = np.arange(self._hand, min(self._hand + max(4 * count, SMALLEST_WINDOW), total))
            free = window[(self.pins[window] == 0) & ~self._used[window]][:count]
            if len(free) == count:
                window = window[: free[-1] + 1 - self._hand]
            self._used[window] = False
            self.pins[free] += 1
            self._hand = int(window[-1] + 1) % total
            found.append(free)
            count, passed = count - len(free), passed + len(window)
        return np.concatenate(found)
