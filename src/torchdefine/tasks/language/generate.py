"""Continuing a text with a language model."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch

from torchdefine.errors import UserError
from torchdefine.modes import evaluating
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.sampling import SamplingOptions, draw


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    length: int,
    options: SamplingOptions | None = None,
    *,
    stop_token: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Continue ``prompt``, one id or more, by up to ``length`` tokens; the state is carried, nothing recomputed."""
    prompt = [int(token) for token in prompt]
    if not prompt:
        raise UserError("The prompt is empty: begin with the end-of-line token, say.")
    if not isinstance(length, Integral) or length < 1:
        raise UserError(f"The length is {length!r}, but must be a whole number of at least 1.")
    options = options or SamplingOptions()
    device = next(model.parameters()).device
    with evaluating(model):
        hidden, state = model.hidden(torch.tensor([prompt], device=device), model.initial_state(1))
        log_probs = model.output.log_prob(hidden[:, -1])  # (1, V)
        continuation = [draw(log_probs[0], options, generator)]
        while len(continuation) < length and continuation[-1] != stop_token:
            log_probs, state = model.step(torch.tensor([continuation[-1:]], device=device), state)
            continuation.append(draw(log_probs[0], options, generator))
        return continuation
