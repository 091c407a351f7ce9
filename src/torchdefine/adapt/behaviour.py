"""How replacements of a table are judged: by the outputs of its model, on text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.adapt.stand_in import StandIn
from torchdefine.adapt.survey import Place, lookup_scale
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.modes import evaluating

Encode = Callable[[nn.Module, Any], Tensor]
"""Runs a model on one batch and gives what matters, (N, d): sentence vectors, or hidden states without padding."""


class Behaviour:
    """A model, the name of the table in it, and how its outputs are read from batches of text.

    Args:
        model: any module; evaluated while it is measured, and left as it was. Freeze a large one: it takes less memory.
        target: the table's name in ``model.named_modules()``, "embeddings.word_embeddings" say.
        encode: runs the model on one batch and gives vectors, (N, d).
        batches: what ``encode`` takes, a fixed list.
        reference: the behaviour of another model with the same texts, whose outputs count instead of this one's own.
    """

    def __init__(
        self,
        model: nn.Module,
        target: str,
        encode: Encode,
        batches: Sequence[Any],
        reference: Behaviour | None = None,
    ) -> None:
        own = dict(model.named_modules()).get(target)
        if own is None or own is model:
            raise UserError(f"The model has no module {target!r}: give a name from model.named_modules().")
        if not batches:
            raise UserError("There is no text to look at: give at least one batch.")
        self.model, self.target, self.encode, self.batches = model, target, encode, list(batches)
        self.reference = reference
        self._scale = lookup_scale(own) if isinstance(own, nn.Embedding) else None
        self._original: list[Tensor | None] = [None] * len(self.batches)

    def similarity(self, table: nn.Module) -> float:
        """Mean cosine between the model's outputs with its own table and with ``table`` in its place."""
        with torch.no_grad():
            cosines = [self.agreements(table, index) for index in range(len(self.batches))]
        return sum(float(some.sum()) for some in cosines) / sum(map(len, cosines))

    def agreements(self, table: nn.Module, index: int) -> Tensor:
        """(N,) for one batch; the gradient flows into the table."""
        wanted = self.original(index)
        with self.swapped(table):
            given = self.encode(self.model, self.batches[index])
        return F.cosine_similarity(given.float(), wanted, dim=-1)

    def original(self, index: int) -> Tensor:
        """What the model gave with its own table for one batch, (N, d); computed once."""
        if self.reference is not None:
            return self.reference.original(index)
        known = self._original[index]
        if known is None:
            with torch.no_grad(), evaluating(self.model):
                known = self._original[index] = self.encode(self.model, self.batches[index]).float()
        return known

    @contextmanager
    def swapped(self, table: nn.Module) -> Iterator[None]:
        """The model with another table for a while, scaled and in the dtype that its own has."""
        place = Place.at(self.model, self.target)
        if self._scale is not None and isinstance(place.module, nn.Embedding):
            table = StandIn(table, place.module, self._scale)
        setattr(place.parent, place.attribute, table)
        try:
            with evaluating(self.model):
                yield
        finally:
            setattr(place.parent, place.attribute, place.module)

    def sensitivity(self, *, seed: int = 0, progress: Progress | None = None) -> Tensor:
        """How sensitive the outputs are to an error in each direction of the table's vectors, (m, m).

        It is the mean outer product of gradients: for every batch one random direction of the outputs is followed
        back to the vectors that the table gave.
        """
        total = torch.zeros(())
        seen: list[Tensor] = []

        def watch(_: nn.Module, __: Any, vectors: Tensor) -> Tensor:
            seen.append(vectors.detach().requires_grad_())
            return seen[-1]

        generator = torch.Generator().manual_seed(seed)
        with self.model.get_submodule(self.target).register_forward_hook(watch):
            for index, batch in enumerate(self.batches):
                seen.clear()
                with torch.enable_grad(), evaluating(self.model):
                    outputs = F.normalize(self.encode(self.model, batch).float(), dim=-1)
                    direction = torch.randn(outputs.shape, generator=generator).to(outputs.device)
                    gradients = torch.autograd.grad((outputs * direction).sum(), seen)
                rows = torch.cat([gradient.flatten(0, -2) for gradient in gradients]).float()  # (tokens, m)
                total = total.to(rows.device) + rows.T @ rows
                if progress:
                    progress(index + 1, len(self.batches))
        return total / total.diagonal().mean().clamp(min=1e-30)
