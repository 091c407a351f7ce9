"""How replacements of a table are judged: by the outputs of its model, on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.adapt.stand_in import StandIn, VectorsHead
from torchdefine.adapt.survey import Place, lookup_scale, survey
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.modes import evaluating

Encode = Callable[[nn.Module, Any], Tensor]
"""Runs a model on one batch and gives what matters, (N, d): sentence vectors, or hidden states without padding."""

MOST_KEPT = 1 << 27
"""Numbers of the model's own outputs that are kept; more are computed each time."""


class Agreement(NamedTuple):
    """How outputs of a model with another table are compared with its own."""

    name: str
    """Of the mean over all outputs."""
    items: Callable[[Tensor, Tensor], Tensor]
    """Given and wanted outputs, (N, d) → (N,); larger is better."""
    mean: Callable[[float], float]
    """Makes the mean of the items a number that is 1 for equal outputs."""
    probe: Callable[[Tensor, torch.Generator], Tensor]
    """Outputs → a random number whose gradients have the curvature of what is lost as their mean outer product."""


def _random_direction(outputs: Tensor, generator: torch.Generator) -> Tensor:
    outputs = F.normalize(outputs, dim=-1)
    return (outputs * torch.randn(outputs.shape, generator=generator).to(outputs.device)).sum()


def _random_token(outputs: Tensor, generator: torch.Generator) -> Tensor:
    """The log-probability of tokens drawn as the model predicts them: its gradients give Fisher's information."""
    logs = outputs.log_softmax(-1)
    noise = torch.rand(logs.shape, generator=generator).to(logs.device).clamp(min=1e-12).log().neg().log()
    drawn = (logs.detach() - noise).argmax(-1, keepdim=True)
    return logs.gather(-1, drawn).sum()


def _minus_kl(given: Tensor, wanted: Tensor) -> Tensor:
    wanted = wanted.log_softmax(-1)
    return (wanted.exp() * (given.log_softmax(-1) - wanted)).sum(-1)


def _cosine(given: Tensor, wanted: Tensor) -> Tensor:
    return F.cosine_similarity(given, wanted, dim=-1)


COSINE = Agreement("mean cosine", _cosine, float, _random_direction)
KL = Agreement("exp(-KL)", _minus_kl, math.exp, _random_token)
"""Of logits, (N, classes)."""


class Behaviour:
    """A model, the name of the table in it, and how its outputs are read from batches of text.

    Args:
        model: any module; evaluated while it is measured, and left as it was. Freeze a large one: it takes less memory.
        target: the table's name in ``model.named_modules()``, "embeddings.word_embeddings" say.
        encode: runs the model on one batch and gives vectors, (N, d).
        batches: what ``encode`` takes, a fixed list.
        reference: the behaviour of another model with the same texts, whose outputs count instead of this one's own.
        agreement: how outputs are compared: by cosines of vectors, or by the KL divergence of logits.
    """

    def __init__(
        self,
        model: nn.Module,
        target: str,
        encode: Encode,
        batches: Sequence[Any],
        reference: Behaviour | None = None,
        agreement: Agreement = COSINE,
    ) -> None:
        own = dict(model.named_modules()).get(target)
        if own is None or own is model:
            raise UserError(f"The model has no module {target!r}: give a name from model.named_modules().")
        if not batches:
            raise UserError("There is no text to look at: give at least one batch.")
        self.model, self.target, self.encode, self.batches = model, target, encode, list(batches)
        self.reference, self.agreement = reference, agreement
        used = (table for table in survey(model) if target in [place.name for place in table.places])
        self._heads = [head for table in used for head in table.heads]
        self._scale = lookup_scale(own) if isinstance(own, nn.Embedding) else None
        self._original: list[Tensor | None] = [None] * len(self.batches)

    def similarity(self, table: nn.Module) -> float:
        """How alike the model's outputs with its own table and with ``table`` in its place are; 1 for the same."""
        with torch.no_grad():
            found = [self.agreements(table, index) for index in range(len(self.batches))]
        return self.agreement.mean(sum(float(some.sum()) for some in found) / sum(map(len, found)))

    def agreements(self, table: nn.Module, index: int) -> Tensor:
        """(N,) for one batch; the gradient flows into the table."""
        wanted = self.original(index)
        with self.swapped(table):
            given = self.encode(self.model, self.batches[index])
        return self.agreement.items(given.float(), wanted)

    def original(self, index: int) -> Tensor:
        """What the model gave with its own table for one batch, (N, d); kept if that takes little."""
        if self.reference is not None:
            return self.reference.original(index)
        known = self._original[index]
        if known is None:
            with torch.no_grad(), evaluating(self.model):
                known = self.encode(self.model, self.batches[index]).float()
            if known.numel() * len(self.batches) <= MOST_KEPT:
                self._original[index] = known
        return known

    @contextmanager
    def swapped(self, table: nn.Module) -> Iterator[None]:
        """The model with another table for a while, scaled and in the dtype that its own has, tied heads too."""
        place = Place.at(self.model, self.target)
        if self._scale is not None and isinstance(place.module, nn.Embedding):
            table = stand_in = StandIn(table, place.module, self._scale)
            for head in self._heads:
                setattr(head.parent, head.attribute, VectorsHead(stand_in, cast(Any, head.module).bias))
        setattr(place.parent, place.attribute, table)
        try:
            with evaluating(self.model):
                yield
        finally:
            for kept in (place, *self._heads):
                setattr(kept.parent, kept.attribute, kept.module)

    def sensitivity(self, *, seed: int = 0, progress: Progress | None = None) -> Tensor:
        """How sensitive the outputs are to an error in each direction of the table's vectors, (m, m).

        It is the mean outer product of gradients: for every batch one random direction of the outputs is followed
        back to the vectors that the table gave, and to those that a tied head has.
        """
        total = torch.zeros(())
        seen: list[Tensor] = []
        read: list[Tensor] = []

        def watch(_: nn.Module, __: Any, vectors: Tensor) -> Tensor:
            seen.append(vectors.detach().requires_grad_())
            return seen[-1]

        def watch_head(_: nn.Module, given: Any, logits: Tensor) -> None:
            read[:] = given[0].detach(), logits

        generator = torch.Generator().manual_seed(seed)
        with ExitStack() as hooks:
            hooks.enter_context(self.model.get_submodule(self.target).register_forward_hook(watch))
            for head in self._heads:
                hooks.enter_context(head.module.register_forward_hook(watch_head))
            for index, batch in enumerate(self.batches):
                seen.clear()
                read.clear()
                with torch.enable_grad(), evaluating(self.model):
                    probe = self.agreement.probe(self.encode(self.model, batch).float(), generator)
                    wanted = [*seen, *(one for one in read[1:] if one.requires_grad)]
                    gradients = torch.autograd.grad(probe, wanted, allow_unused=True)
                found = [one.flatten(0, -2) for one in gradients[: len(seen)] if one is not None]
                for one in (one for one in gradients[len(seen) :] if one is not None):  # of logits: times what was read
                    found.append((read[0] * one.norm(dim=-1, keepdim=True)).flatten(0, -2))
                rows = torch.cat(found).float()  # (tokens, m)
                total = total.to(rows.device) + rows.T @ rows
                if progress:
                    progress(index + 1, len(self.batches))
        return total / total.diagonal().mean().clamp(min=1e-30)
