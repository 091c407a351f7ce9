"""Perplexity that can be trusted: every token counted once, and the protocol said beside the number."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from torchdefine.context import State
from torchdefine.data import TokenFile, TokenStreams
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.modes import reading
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.training.cuda_graphs import CudaGraphs, Hint, Inputs, copy_state, own_copy
from torchdefine.training.evaluation import Evaluation, arithmetic

PUBLIC_STREAMS = 10
"""The number of streams, each from an empty memory, in the evaluation of the public Transformer-XL code."""
FEWEST_RECORDED = 20
"""Segments; recording a CUDA graph does not pay for fewer."""
SHORT_STREAM = 200
"""Tokens; in shorter streams the words without context count so much that the perplexity is clearly too high."""


@torch.no_grad()
def evaluate(
    model: Any,
    text: TokenFile,
    start_token: int,
    *,
    batch_size: int = 1,
    length: int = 140,
    note: str = "",
    progress: Progress | None = None,
) -> Evaluation:
    """Predict every token of ``text`` from those before it, in float32, the state carried on between segments.

    ``model`` is a ``LanguageModel``, or one with a neural cache, of which ``note`` tells in the protocol.
    With ``batch_size`` streams, each but the first starts without the context that came before it; 1 is exact.
    """
    for name, value in (("batch_size", batch_size), ("length", length)):
        if not isinstance(value, Integral) or value < 1:
            raise UserError(f"The {name} of an evaluation is {value!r}, but must be a whole number of at least 1.")
    device, count = next(model.parameters()).device, min(batch_size, len(text))
    streams = TokenStreams(np.asarray(text.tokens), count, device, start_token, pad=True)
    nats = torch.zeros((), dtype=torch.float64, device=device)
    state: State = None
    # Launching a short segment takes longer than computing it, so that work is recorded as a CUDA graph and replayed.
    worthwhile = device.type == "cuda" and streams.length > FEWEST_RECORDED * length
    recorded = worthwhile and isinstance(model, LanguageModel)

    def add(inputs: Inputs, hints: Sequence[Hint]) -> None:
        nonlocal nats, state
        ((ids, targets),) = inputs
        losses, after = model(ids, targets, state, reduction="sum", hint=hints[0])
        nats += losses.cross_entropy.double()
        if recorded:
            copy_state(state, after)
        else:
            state = after

    with reading(model) as model:
        state = model.initial_state(count)
        if recorded:
            state = own_copy(state)
        add_segment = CudaGraphs(add, device) if recorded else add
        for start in range(0, streams.length, length):
            inputs, targets = streams.segment(start, length)  # (B, T)
            add_segment([(inputs, targets)], [model.host_hint(streams.host_targets(start, length))])
            if progress:
                progress(min(start + length, streams.length), streams.length)
    protocol = (
        f"{count} stream{'s' if count > 1 else ''} from an empty state, {model.carried} carried over segments of "
        f"{length} tokens, every token predicted once, {arithmetic(model)}{note}"
    )
    return Evaluation.of(float(nats), text.header, protocol)


def short_stream_warning(tokens: int, streams: int) -> str:
    """A sentence about a text that is too short for that many streams; empty for others."""
    if streams == 1 or tokens >= SHORT_STREAM * streams:
        return ""
    return (
        f"The perplexity is probably too high: {min(streams, tokens)} streams share only {tokens:,} tokens, "
        "and each starts without context."
    )


def unigram_perplexity(counts: Sequence[int] | np.ndarray, tokens: np.ndarray) -> float:
    """The perplexity of a model that knows only word frequencies in training: the bar every model must clear."""
    if len(tokens) == 0:
        raise UserError("The text is empty, so it has no perplexity.")
    frequency = np.asarray(counts, dtype=np.float64)
    seen = np.maximum(frequency, 0.5)[tokens]  # a word outside the training text counts as half a sighting
    return float(np.exp(-np.mean(np.log(seen / frequency.sum()))))
