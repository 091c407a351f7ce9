"""Perplexity that can be trusted: every token counted once, and the protocol said beside the number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from torchdefine.context import State
from torchdefine.data import TokenFile, TokenStreams
from torchdefine.errors import UserError
from torchdefine.modes import evaluating
from torchdefine.output import HostHint
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.training.carried_state import copy_state, own_copy
from torchdefine.training.evaluation import Evaluation, arithmetic, perplexity
from torchdefine.training.recording import Hint, Inputs, Recorder

PUBLIC_STREAMS = 10
"""The number of streams, each from an empty memory, in the evaluation of the public Transformer-XL code."""
FEWEST_RECORDED = 20
"""Segments; a recording does not pay for fewer."""

SHORT_STREAM = 200
"""Tokens; in shorter streams the words without context count so much that the perplexity is clearly too high."""


Predict = Callable[[Tensor, Tensor, State, HostHint | None], tuple[Tensor, State]]
"""Inputs and targets (B, T), state, hint → nats of all targets together, in any shape, and the state after them."""


def evaluate(
    model: LanguageModel,
    text: TokenFile,
    start_token: int,
    *,
    batch_size: int = 1,
    length: int = 140,
    predict: Predict | None = None,
    note: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Predict every token of ``text`` from those before it, in float32, the state carried on between segments.

    With ``batch_size`` streams, each but the first starts without the context that came before it; 1 is exact.
    ``predict`` takes the place of the model's own loss, and ``note`` says in the protocol what it does.
    """
    nats = float(total_nats(model, text, start_token, predict, batch_size=batch_size, length=length, progress=progress))
    streams, header = min(batch_size, len(text)), text.header
    return Evaluation(
        tokens=len(text),
        loss=nats / len(text),
        perplexity=perplexity(nats / len(text)),
        bits_per_byte=nats / math.log(2) / header.bytes if header.bytes else None,
        unknown_share=header.unknown / len(text),
        protocol=f"{streams} stream{'s' if streams > 1 else ''} from an empty state, "
        f"{getattr(model, 'carried', 'state')} carried over segments of {length} tokens, every token predicted once, "
        f"{arithmetic(model)}{note}",
    )


@torch.no_grad()
def total_nats(
    model: LanguageModel,
    text: TokenFile,
    start_token: int,
    predict: Predict | None = None,
    *,
    batch_size: int = 1,
    length: int = 140,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The sum of what ``predict``, or the model itself, returns for every segment of a text, in float64."""
    for name, value in (("batch_size", batch_size), ("length", length)):
        if not isinstance(value, Integral) or value < 1:
            raise UserError(f"The {name} of an evaluation is {value!r}, but must be a whole number of at least 1.")
    device = next(model.parameters()).device
    streams = TokenStreams(np.asarray(text.tokens), min(batch_size, len(text)), device, start_token, pad=True)
    with evaluating(model):
        state = model.initial_state(streams.batch_size)
        worth_recording = device.type == "cuda" and streams.length > FEWEST_RECORDED * length
        kind = _RecordedSum if worth_recording and predict is None else _Sum
        summed = kind(predict or _plain(model), state, device)
        for start in range(0, streams.length, length):
            inputs, targets = streams.segment(start, length)  # (B, T)
            summed(inputs, targets, model.host_hint(streams.host_targets(start, length)))
            if progress:
                progress(min(start + length, streams.length), streams.length)
        return summed.total


class _Sum:
    """Sums the nats of segments, each starting from the state after the one before."""

    def __init__(self, predict: Predict, state: State, device: torch.device) -> None:
        self.predict, self.state = predict, state
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, inputs: Tensor, targets: Tensor, hint: Hint) -> None:
        nats, self.state = self.predict(inputs, targets, self.state, hint)
        self.total = self.total + nats.double()


class _RecordedSum(_Sum):
    """The same for one number a segment, replayed from CUDA graphs: launching a short segment takes longer than it."""

    def __init__(self, predict: Predict, state: State, device: torch.device) -> None:
        super().__init__(predict, own_copy(state), device)
        self._recorder = Recorder(self._in_place, device)

    def __call__(self, inputs: Tensor, targets: Tensor, hint: Hint) -> None:
        self._recorder([(inputs, targets)], [hint])

    def _in_place(self, inputs: Inputs, hints: Sequence[Hint]) -> None:
        ((ids, targets),) = inputs
        nats, after = self.predict(ids, targets, self.state, hints[0])
        self.total += nats.double()
        copy_state(self.state, after)


def _plain(model: LanguageModel) -> Predict:
    def predict(inputs: Tensor, targets: Tensor, state: State, hint: HostHint | None) -> tuple[Tensor, State]:
        losses, state = model(inputs, targets, state, reduction="sum", hint=hint)
        return losses.cross_entropy, state

    return predict


def short_stream_warning(tokens: int, streams: int) -> str:
    """A sentence about a text that is too short for that many streams; empty for others."""
    if streams == 1 or tokens >= SHORT_STREAM * streams:
        return ""
    return (
        f"The perplexity is likely too high: {tokens:,} tokens in {min(streams, tokens)} streams are short pieces, "
        "each begun without context."
    )


def unigram_perplexity(counts: Sequence[int] | np.ndarray, tokens: np.ndarray) -> float:
    """The perplexity of a model that knows only word frequencies in training: the bar every model must clear."""
    frequency = np.asarray(counts, dtype=np.float64)
    if len(tokens) == 0:
        raise UserError("The text is empty, so it has no perplexity.")
    seen = np.maximum(frequency, 0.5)[tokens]  # a word outside the training text counts as half a sighting
    return float(np.exp(-np.mean(np.log(seen / frequency.sum()))))
