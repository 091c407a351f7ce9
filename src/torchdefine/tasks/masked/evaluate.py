"""Masked perplexity: the same tokens are hidden in every evaluation of a text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from torchdefine.data import IGNORE, TokenFile
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.modes import reading
from torchdefine.tasks.masked.batches import Hidden, Masking, PackedRows
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.text import MaskedTokenizer
from torchdefine.training.evaluation import Evaluation, arithmetic, perplexity


class Protocol(NamedTuple):
    """How a text is cut and hidden."""

    masking: Masking
    tokens: MaskedTokenizer
    length: int
    batch_size: int
    seed: int


@torch.no_grad()
def evaluate(
    model: MaskedModel,
    text: TokenFile,
    protocol: Protocol,
    *,
    with_accuracy: bool = False,
    progress: Progress | None = None,
) -> tuple[Evaluation, float | None]:
    """The perplexity of hidden tokens, in float32; and, if asked for, the fraction that is predicted right."""
    masking, tokens, length, batch_size, seed = protocol
    device = next(model.parameters()).device
    rows = PackedRows(np.asarray(text.tokens), length, tokens.bos_id)
    nats, right = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    count, starts = 0, range(0, rows.whole, batch_size)
    with reading(model) as model:
        for start in [*starts, None]:
            if start is None:
                chosen, number = rows.rest(), rows.whole  # a shorter row of what is left
            else:
                chosen, number = rows.rows(np.arange(start, min(start + batch_size, rows.whole))), start
            if not chosen.size or chosen.shape[1] < 2:
                continue
            each = (masking.hide(row[None], np.random.default_rng((seed, number + i))) for i, row in enumerate(chosen))
            hidden = Hidden(*map(np.concatenate, zip(*each, strict=True)))  # whatever the size of the batch
            part = hidden.part(device)
            ids, places, targets = part.inputs
            vectors = model.at(places, model.hidden(ids))
            bands = model.host_hint(part.host_targets).bands
            nats += model.output.loss(vectors, targets, reduction="sum", hint=bands).double()
            if with_accuracy:
                right += (model.output.predict(vectors) == targets).sum()
            count += int(np.count_nonzero(hidden.targets != IGNORE))
            if progress:
                progress(min(number + batch_size, rows.whole), rows.whole)
    if not count:
        raise UserError(f"The text has {len(text)} tokens, and none of them could be hidden: give a longer one.")
    config = masking.config
    whole = " by whole words" if config.whole_words else ""
    told = (
        f"rows of {length} tokens, {config.fraction:.0%} of them predicted{whole} (mask {config.masked:.0%}, random "
        f"{config.random:.0%}), seed {seed}, {arithmetic(model)}"
    )
    loss = float(nats) / count
    unknown = text.header.unknown / len(text)
    found = Evaluation(count, loss, perplexity(loss), None, unknown, told)
    return found, float(right) / count if with_accuracy else None
