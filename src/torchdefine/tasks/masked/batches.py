"""Running text in rows of equal length, and the tokens that are hidden in each of them.

Shapes: B rows (the batch), T tokens in each row, K of them predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torchdefine.config import Config, setting
from torchdefine.data.batches import IGNORE, shard, to_device
from torchdefine.errors import UserError
from torchdefine.tasks.masked.text import MaskedTokenizer
from torchdefine.training.distributed import Processes
from torchdefine.training.step import Batch, Part


@dataclass(frozen=True)
class MaskingConfig(Config):
    """Which tokens are predicted, and what stands in their place."""

    fraction: float = setting(0.15, "Fraction of the tokens that are predicted.", above=0, below=1)
    masked: float = setting(0.8, "Fraction of these that the mask token replaces.", at_least=0, at_most=1)
    random: float = setting(0.1, "Fraction of these that a random token replaces.", at_least=0, at_most=1)
    whole_words: bool = setting(False, "Whether all subwords of a word are predicted together.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.masked + self.random <= 1,
            f"masked {self.masked:g} and masking.random {self.random:g} are more than 1 together: use smaller ones.",
        )


class PackedRows:
    """A text of N tokens in rows of T: each begins with ``<bos>`` and goes on where the one before ended."""

    def __init__(self, tokens: np.ndarray, length: int, bos_id: int) -> None:
        self.tokens, self.length, self.bos_id = tokens, length, bos_id
        self.whole = len(tokens) // (length - 1)
        """How many rows are full."""

    def rows(self, chosen: np.ndarray) -> np.ndarray:
        """Full rows by number: (B, T)."""
        places = chosen[:, None] * (self.length - 1) + np.arange(self.length - 1)
        return self._begun(self.tokens[places])

    def rest(self) -> np.ndarray:
        """What the full rows leave over, as a shorter row, (1, t), or none, (0, 1)."""
        left = self.tokens[self.whole * (self.length - 1) :][None]
        return self._begun(left if left.size else left[:0])

    def _begun(self, tokens: np.ndarray) -> np.ndarray:
        return np.pad(tokens.astype(np.int64), ((0, 0), (1, 0)), constant_values=self.bos_id)


class Hidden(NamedTuple):
    """Rows with some tokens hidden."""

    ids: np.ndarray
    """(B, T): what the model reads."""
    places: np.ndarray
    """(B, K): which of them it predicts."""
    targets: np.ndarray
    """(B, K): what stood there; ``IGNORE`` where a row has fewer tokens to hide."""

    def part(self, device: torch.device | str, weight: float = 1.0) -> Part:
        """For a step of training, or an evaluation; the host keeps ids and targets in one array, (2, B, T)."""
        targets = np.full_like(self.ids, IGNORE)
        np.put_along_axis(targets, self.places, self.targets, axis=1)
        return Part(tuple(to_device(array, device) for array in self), np.stack((self.ids, targets)), weight)


class Masking:
    """Hides tokens of rows: as many in every row, so that all steps have one shape."""

    def __init__(self, config: MaskingConfig, tokenizer: MaskedTokenizer) -> None:
        self.config, self.mask_id = config, tokenizer.mask_id
        self.special, self.begins = tokenizer.is_special, tokenizer.begins_word
        self.ordinary = np.flatnonzero(~self.special)

    def hide(self, rows: np.ndarray, random: np.random.Generator) -> Hidden:
        """A fraction of the tokens of (B, T), special ones aside, chosen by the generator."""
        count = max(1, round(self.config.fraction * rows.shape[1]))  # K
        words = np.arange(rows.size).reshape(rows.shape)  # every token for itself
        if self.config.whole_words:
            words = self.begins[rows].ravel().cumsum().reshape(rows.shape)  # a row begins with a special token
        order = random.random(rows.size + 1)[words]  # (B, T): equal for the tokens of a word
        order[self.special[rows]] = 2.0
        sorted_places = np.argsort(order, axis=1, kind="stable")[:, : count + 1]
        of_word = np.take_along_axis(words, sorted_places, axis=1)  # (B, K + 1)
        places, cut = sorted_places[:, :count], of_word[:, count:]
        targets = np.take_along_axis(rows, places, axis=1)  # (B, K)
        counted = ~self.special[targets] & (of_word[:, :count] != cut)  # a word that does not fit stays whole
        return Hidden(self._covered(rows, places, counted, random), places, np.where(counted, targets, IGNORE))

    def _covered(
        self, rows: np.ndarray, places: np.ndarray, counted: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """The rows with what the model sees at the places that count."""
        fate, drawn = random.random(places.shape), random.choice(self.ordinary, places.shape)
        own = np.take_along_axis(rows, places, axis=1)
        masked, randomised = self.config.masked, self.config.masked + self.config.random
        seen = np.where(fate < masked, self.mask_id, np.where(fate < randomised, drawn, own))
        ids = rows.copy()
        np.put_along_axis(ids, places, np.where(counted, seen, own), axis=1)
        return ids


class MaskedBatches:
    """Batches of shuffled rows; order and hidden tokens follow from seed, epoch and step alone."""

    rows_per_part = 0  # nothing is carried from batch to batch

    def __init__(
        self, rows: PackedRows, masking: Masking, config: Any, device: torch.device, processes: Processes
    ) -> None:
        """``config`` are the recipe's settings of training."""
        self.rows, self.masking, self.config, self.device = rows, masking, config, device
        self.own = shard(self.config.batch_size, processes.rank, processes.count, self.config.accumulate)
        whole = rows.whole // self.config.batch_size
        if not whole:
            raise UserError(
                f"The text fills {rows.whole} rows of {rows.length} tokens, too few for a batch of "
                f"{self.config.batch_size}: use a smaller train.batch_size or train.length, or a longer text."
            )
        self.steps_per_epoch = float(whole)
        self.total_steps = self.config.steps or math.ceil((self.config.epochs or 1) * whole)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, int(self.steps_per_epoch))
        if self._order[0] != epoch:
            shuffled = np.random.default_rng((self.config.seed, epoch)).permutation(self.rows.whole)
            self._order = (epoch, shuffled)
        start = index * self.config.batch_size
        chosen = self._order[1][start : start + self.config.batch_size]
        # All processes hide the same tokens of the whole batch, and each takes its rows.
        hidden = self.masking.hide(self.rows.rows(chosen), np.random.default_rng((self.config.seed, epoch, index)))
        own = Hidden(*(array[self.own] for array in hidden))
        mean = np.count_nonzero(hidden.targets != IGNORE) * len(own.ids) / len(hidden.ids)  # of a process
        parts = [part.part(self.device, np.count_nonzero(part.targets != IGNORE) / mean) for part in self._split(own)]
        tokens = int(np.count_nonzero(own.targets != IGNORE))
        return Batch(parts, tokens=tokens, place=f"batch {index} of the {int(self.steps_per_epoch)} of a pass")

    def _split(self, hidden: Hidden) -> Iterator[Hidden]:
        for arrays in zip(*(np.split(array, self.config.accumulate) for array in hidden), strict=True):
            yield Hidden(*arrays)

    def epoch_after(self, steps: int) -> float:
        return steps / self.steps_per_epoch
