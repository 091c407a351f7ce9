"""All vectors of an embedding, computed or learned in bounded memory, and their look-up in place of computing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdefine.embedding.unit import DefineUnit, DenseMLP, DenseProjection
from torchdefine.errors import UserError
from torchdefine.modes import Prepared, twins

TOKENS_AT_ONCE = 16_384
"""Enough to keep a device busy; a unit 4,096 wide then needs about 1 GiB of working memory in float32."""
TOKENS_AT_ONCE_ON_CPU = 1_024
"""There the system would hand the memory of larger layers out anew, page by page, in every chunk."""
RECOMPUTED = (DefineUnit, DenseMLP, DenseProjection)
"""Units that give the same vectors a second time: what they draw is drawn before."""


@torch.no_grad()
def finished_table(
    embedding: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    computing: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The vectors of all V tokens, (V, m), as ``embedding`` would give them in evaluation.

    They are computed where the embedding is, a chunk of tokens at a time, and stored on ``device`` as ``dtype``
    (the embedding's own by default). ``progress`` is called with the tokens done and the tokens in all.
    """
    total = int(embedding.num_embeddings)  # type: ignore[arg-type]
    table, done = torch.empty(0), 0
    with in_evaluation(embedding, computing=computing) as twin:
        for ids in id_chunks(embedding):
            vectors = twin(ids)  # (chunk, m)
            if not done:
                shape = (total, vectors.shape[-1])
                table = torch.empty(shape, dtype=dtype or vectors.dtype, device=device or vectors.device)
            table[done : done + len(ids)] = vectors
            done += len(ids)
            if progress:
                progress(done, total)
    return table


@contextmanager
def in_evaluation(embedding: nn.Module, *, computing: bool = False, alone: bool = True) -> Iterator[Any]:
    """An embedding in evaluation mode, in its own precision even within autocast: a twin of it, with the same weights.

    With ``computing`` it computes its vectors even where the embedding looks them up; ``alone`` says whether they are
    those of single tokens.
    """
    made = twins(embedding)
    for twin in list(made.values()):
        if computing and isinstance(twin, LooksUp):
            twin.look_up(None)
        if alone and isinstance(twin, LooksUp):
            twin.stand_alone()
        if isinstance(twin, Prepared):
            twin.prepare(True)
    device = next(embedding.parameters()).device.type
    exactly = nullcontext() if device == "meta" else torch.autocast(device, enabled=False)  # meta has no autocast
    with exactly:
        yield made[embedding]


def id_chunks(embedding: nn.Module) -> Iterator[Tensor]:
    """All ids of an embedding where it is, as many at a time as suit the device."""
    total, device = int(embedding.num_embeddings), next(embedding.parameters()).device  # type: ignore[arg-type]
    chunk = min(TOKENS_AT_ONCE, TOKENS_AT_ONCE_ON_CPU) if device.type == "cpu" else TOKENS_AT_ONCE
    for start in range(0, total, chunk):
        yield torch.arange(start, min(start + chunk, total), device=device)


def through_unit(unit: nn.Module, mapped: Tensor) -> Tensor:
    """(V, n) → (V, m), ``TOKENS_AT_ONCE`` rows at a time.

    Backward computes a part of the rows again, so that only one part's layers are in memory at a time. What dropout
    keeps is drawn once, a byte for each feature. Somebody else's unit keeps all of its layers' outputs.
    """
    parts = mapped.split(TOKENS_AT_ONCE)
    again = len(parts) > 1 and torch.is_grad_enabled() and type(unit) in RECOMPUTED
    finished: list[Tensor] = []
    for part in parts:
        if not again:
            finished.append(unit(part))
        else:
            kept = unit.drawn(len(part), part.device) if isinstance(unit, DefineUnit) else None
            settings: Any = {"use_reentrant": False, "preserve_rng_state": False}
            finished.append(checkpoint(unit, part, *([] if kept is None else [None, kept]), **settings))
    return finished[0] if len(finished) == 1 else torch.cat(finished)


def tensors_of(*parts: object) -> Iterator[Tensor]:
    """The parameters and buffers of those that are modules."""
    for part in parts:
        if isinstance(part, nn.Module):
            yield from chain(part.parameters(), part.buffers())


def _weights_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    """Where each weight of a module stands, and how often it has been written to."""
    for part in twins(module):
        for name, tensor in part._parameters.items():
            if tensor is not None and not tensor.is_inference():
                yield part, name, tensor, tensor._version


class LooksUp(nn.Module):
    """A module of V vectors that may look them up in another one, instead of computing them, until its weights change.

    That is until ``train()``, ``load_state_dict()`` or whatever else calls ``look_up(None)``.
    """

    num_embeddings: Any
    embedding_dim: Any
    looked_up: nn.Module | None = None
    """Gives the vectors of ids, as ``nn.Embedding`` does. It moves with this module and is not part of its weights."""

    def look_up(self, table: Tensor | nn.Module | None) -> None:
        """Take the vectors from a matrix, (V, m), or a module with such rows; None computes them.

        In training it is refused: nothing would learn through it.
        """
        module: Any = nn.Embedding.from_pretrained(table) if isinstance(table, Tensor) else table
        if module is not None:
            given = module.num_embeddings, module.embedding_dim
            own = self.num_embeddings, self.embedding_dim
            if given != own:
                raise UserError(f"The table is {given}, but the embedding has {own[0]} vectors of {own[1]}.")
            if self.training:
                raise UserError("The embedding is in training mode, but a table cannot be trained: call eval() first.")
        self._made_from = [] if module is None else [*_weights_of(self)]
        object.__setattr__(self, "looked_up", module)  # around nn.Module, which would register it

    def stand_alone(self) -> None:
        """Give vectors that depend on the token alone, or refuse; those of most embeddings do."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # a copy, whose weights are new
        if self.looked_up is not None:
            self._made_from = [*_weights_of(self)]

    def has_other_weights(self) -> bool:
        """Whether its weights are not those that it had when it began to look vectors up.

        They were written to, or ``torch.func.functional_call`` has put others in their place.
        """
        return not torch.compiler.is_compiling() and any(
            part._parameters.get(name) is not tensor or tensor._version != version
            for part, name, tensor, version in self._made_from
        )

    @property
    def cached_vectors(self) -> Tensor | None:
        """The matrix, (V, m), that vectors are looked up in, if it is one."""
        return self.looked_up.weight if type(self.looked_up) is nn.Embedding else None

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.look_up(None)  # the weights are about to change
        return super().train(mode)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.look_up(None if self.looked_up is None else self.looked_up._apply(fn))
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.look_up(None)  # the table belongs to the old weights
        super()._load_from_state_dict(*arguments, **options)
