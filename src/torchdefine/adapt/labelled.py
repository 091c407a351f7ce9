"""A user's own pairs and labels: what a smaller model makes of them beside the old one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdefine.adapt.measures import Measure, measured
from torchdefine.adapt.purposes import Classes, Purpose, Read, Vectors
from torchdefine.adapt.sentences import sentence_vectors
from torchdefine.data import read_text
from torchdefine.errors import UserError

FEWEST = 40

Statistic = Callable[[Tensor, Tensor], float]
"""Values of some examples, and which they are."""


@dataclass(frozen=True)
class Pairs:
    """Texts that belong together; with scores, how much each two do."""

    first: list[str]
    second: list[str]
    scores: Tensor | None

    @classmethod
    def read(cls, path: str | Path) -> Pairs:
        """Lines of two texts, and a number if there are scores, with tabulators between."""
        rows = _rows(path, (2, 3), "two texts, or two texts and a number")
        try:
            scores = torch.tensor([float(row[2]) for row in rows]) if len(rows[0]) == 3 else None
        except ValueError:
            raise UserError(
                f"{path} has a score that is not a number: write a number, or leave out all scores."
            ) from None
        return cls([row[0] for row in rows], [row[1] for row in rows], scores)

    def check(self, purpose: Purpose) -> None:
        if not isinstance(purpose, Vectors):
            raise UserError("Pairs need a model of sentences, and this model is of another kind: leave them out.")

    def measures(self, purpose: Purpose, before: Read, after: Read) -> dict[str, Measure]:
        """Rank correlation of cosines with scores; or how early a text finds its own among all second ones."""
        scores = self.scores
        if scores is None:
            return {"pairs, mean reciprocal rank": _compared(_mean, self._reciprocal_ranks, before, after)}
        wanted = scores

        def correlation(values: Tensor, some: Tensor) -> float:
            both = torch.stack([_ranks(values), _ranks(wanted[some])])
            return float(torch.corrcoef(both)[0, 1])

        return {"pairs, rank correlation": _compared(correlation, self._cosines, before, after)}

    def _vectors(self, model: Read) -> tuple[Tensor, Tensor]:
        one, other = (F.normalize(sentence_vectors(*model, texts), dim=-1) for texts in (self.first, self.second))
        return one, other

    def _cosines(self, model: Read) -> Tensor:
        one, other = self._vectors(model)
        return (one * other).sum(-1)

    def _reciprocal_ranks(self, model: Read) -> Tensor:
        one, other = self._vectors(model)
        likes = one @ other.T
        return 1 / (likes >= likes.diagonal().unsqueeze(1)).sum(1)


@dataclass(frozen=True)
class Labels:
    """Texts with the names of their classes."""

    texts: list[str]
    names: list[str]

    @classmethod
    def read(cls, path: str | Path) -> Labels:
        """Lines of a text and a name, with a tabulator between."""
        rows = _rows(path, (2,), "a text and a label")
        return cls([row[0] for row in rows], [row[1].strip() for row in rows])

    def check(self, purpose: Purpose) -> None:
        if not isinstance(purpose, Vectors | Classes):
            raise UserError(
                "Labels need a model of sentences or a classifier, and this model is of another kind: leave them out."
            )

    def measures(self, purpose: Purpose, before: Read, after: Read) -> dict[str, Measure]:
        """Accuracy: of a classifier's own classes; or, of every second text, by the nearest centre of the others."""
        hits = self._by_model if isinstance(purpose, Classes) else self._by_centre
        return {"labels, accuracy": _compared(_mean, partial(hits, purpose), before, after)}

    @torch.no_grad()
    def _by_model(self, purpose: Purpose, model: Read) -> Tensor:
        batches = purpose.batches(*model, self.texts)
        classes = torch.cat([purpose.encode(model[0], batch).argmax(-1).cpu() for batch in batches]).tolist()
        names = model[0].config.id2label
        return torch.tensor([names[one] == name for one, name in zip(classes, self.names, strict=True)]).float()

    def _by_centre(self, purpose: Purpose, model: Read) -> Tensor:
        vectors = F.normalize(sentence_vectors(*model, self.texts), dim=-1)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(self.names[::2]))}
        known = torch.tensor([numbers[name] for name in self.names[::2]])
        centres = F.normalize(F.one_hot(known, len(numbers)).T.float() @ vectors[::2], dim=-1)
        asked = torch.tensor([numbers.get(name, -1) for name in self.names[1::2]])
        return ((vectors[1::2] @ centres.T).argmax(1) == asked).float()


def _compared(statistic: Statistic, values: Callable[[Read], Tensor], before: Read, after: Read) -> Measure:
    old, new = values(before), values(after)
    return measured(lambda some: statistic(new[some], some), len(new), lambda some: statistic(old[some], some))


def _mean(values: Tensor, some: Tensor) -> float:
    return float(values.mean())


def _ranks(values: Tensor) -> Tensor:
    """Of each value, the mean of the ranks that equal ones have."""
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[which].double()


def _rows(path: str | Path, lengths: tuple[int, ...], what: str) -> list[list[str]]:
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no file {path}: give a file with {what} in each line, separated by tabs.")
    rows = [line.split("\t") for block in read_text(path) for line in block.lines if line.strip()]
    if len(rows) < FEWEST:
        raise UserError(f"{path} has {len(rows)} examples, but {FEWEST} are needed: give more.")
    if len(rows[0]) not in lengths or any(len(row) != len(rows[0]) for row in rows):
        raise UserError(f"{path} needs {what} in each line, separated by tabs.")
    return rows
