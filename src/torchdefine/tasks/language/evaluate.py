"""Perplexity that can be trusted: every token counted once, and the protocol said beside the number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from torchdefine.context import State
from torchdefine.data import TokenFile, evaluation_streams
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.modes import evaluating
from torchdefine.output import HostHint
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.training.carried_state import copy_state, own_copy
from torchdefine.training.evaluation import Evaluation, arithmetic
from torchdefine.training.recording import Hint, Inputs, Recorder

PUBLIC_STREAMS = 10
"""The number of streams, each from an empty memory, in the evaluation of the public Transformer-XL code."""
FEWEST_RECORDED = 20
"""Segments; recording a CUDA graph does not pay for fewer."""
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
    progress: Progress | None = None,
) -> Evaluation:
    """Predict every token of ``text`` from those before it, in float32, the state carried on between segments.

    With ``batch_size`` streams, each but the first starts without the context that came before it; 1 is exact.
    ``predict`` takes the place of the model's own loss, and ``note`` says in the protocol what it does.
    """
    nats = float(total_nats(model, text, start_token, predict, batch_size=batch_size, length=length, progress=progress))
    streams = min(batch_size, len(text))
    protocol = (
        f"{streams} stream{'s' if streams > 1 else ''} from an empty state, {model.carried} carried over segments of "
        f"{length} tokens, every token predicted once, {arithmetic(model)}{note}"
    )
    return Evaluation.of(nats, text.header, protocol)


@torch.no_grad()
def total_nats(
    model: LanguageModel,
    text: TokenFile,
    start_token: int,
    predict: Predict | None = None,
    *,
    batch_size: int = 1,
    length: int = 140,
    progress: Progress | None = None,
) -> Tensor:
    """The sum of what ``predict``, or the model itself, returns for every segment of a text, in float64."""
    for name, value in (("batch_size", batch_size), ("length", length)):
        if not isinstance(value, Integral) or value < 1:
            raise UserError(f"The {name} of an evaluation is {value!r}, but must be a whole number of at least 1.")
    device = next(model.parameters()).device
    streams = evaluation_streams(np.asarray(text.tokens), min(batch_size, len(text)), start_token, device)
    with evaluating(model):
        recorded = device.type == "cuda" and streams.length > FEWEST_RECORDED * length and predict is None
        summed = _Sum(predict or _plain(model), model.initial_state(streams.batch_size), device, recorded)
        for start in range(0, streams.length, length):
            inputs, targets = streams.segment(start, length)  # (B, T)
            summed.add([(inputs, targets)], [model.host_hint(streams.host_targets(start, length))])
            if progress:
                progress(min(start + length, streams.length), streams.length)
        return summed.total


class _Sum:
    """The nats of segments, each from the state after the one before.

    ``recorded`` replays the work from CUDA graphs, since launching a short segment takes longer than computing it;
    its results are one number a segment and a state of fixed shape, written in place.
    """

    def __init__(self, predict: Predict, state: State, device: torch.device, recorded: bool) -> None:
        self.predict, self.recorded = predict, recorded
        self.state = own_copy(state) if recorded else state
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.add = Recorder(self._add, device) if recorded else self._add

    def _add(self, inputs: Inputs, hints: Sequence[Hint]) -> None:
        ((ids, targets),) = inputs
        nats, after = self.predict(ids, targets, self.state, hints[0])
        if self.recorded:
            self.total += nats.double()
            copy_state(self.state, after)
        else:
            self.total, self.state = self.total + nats.double(), after


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
    if len(tokens) == 0:
        raise UserError("The text is empty, so it has no perplexity.")
    frequency = np.asarray(counts, dtype=np.float64)
    seen = np.maximum(frequency, 0.5)[tokens]  # a word outside the training text counts as half a sighting
    return float(np.exp(-np.mean(np.log(seen / frequency.sum()))))
