"""All finished vectors of an embedding, computed in bounded memory, and the look-up table made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from torchdefine.modes import evaluating

TOKENS_AT_ONCE = 16_384
"""Enough to keep a device busy; a unit 4,096 wide then needs about 1 GiB of working memory in float32."""


@torch.no_grad()
def finished_table(
    embedding: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The vectors of all V tokens, (V, m), as ``embedding`` would give them in evaluation.

    They are computed where the embedding is, ``TOKENS_AT_ONCE`` at a time, and stored on ``device`` as ``dtype``
    (the embedding's own by default). ``progress`` is called with the tokens done and the tokens in all.
    """
    total = int(embedding.num_embeddings)  # type: ignore[arg-type]
    table: Tensor | None = None
    done = 0
    with in_evaluation(embedding):
        for ids in id_chunks(embedding):
            vectors = embedding(ids)  # (chunk, m)
            if table is None:
                table = torch.empty(
                    total, vectors.shape[-1], dtype=dtype or vectors.dtype, device=device or vectors.device
                )
            table[done : done + len(ids)] = vectors
            done += len(ids)
            if progress:
                progress(done, total)
    assert table is not None
    return table


@contextmanager
def in_evaluation(embedding: nn.Module) -> Iterator[None]:
    """Put an embedding into evaluation mode for a while, in its own precision even within autocast.

    This includes a unit that it borrows from another embedding.
    """
    unit, device = getattr(embedding, "unit", None), next(embedding.parameters()).device.type
    exactly = nullcontext() if device == "meta" else torch.autocast(device, enabled=False)  # meta has no autocast
    with evaluating(embedding, unit), exactly:
        yield


def id_chunks(embedding: nn.Module) -> Iterator[Tensor]:
    """All ids of an embedding where it is, ``TOKENS_AT_ONCE`` at a time."""
    total, device = int(embedding.num_embeddings), next(embedding.parameters()).device  # type: ignore[arg-type]
    for start in range(0, total, TOKENS_AT_ONCE):
        yield torch.arange(start, min(start + TOKENS_AT_ONCE, total), device=device)


def cached_embedding(
    embedding: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> nn.Embedding:
    """An ``nn.Embedding`` with the same answers and nothing to learn, for inference."""
    table = finished_table(embedding, dtype=dtype, progress=progress)
    return nn.Embedding.from_pretrained(table, freeze=True, padding_idx=embedding.padding_idx)
