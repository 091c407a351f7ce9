"""Drawing tokens from log-probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdefine.errors import MachineError, UserError, check_count

NO_PROBABILITIES = "The model gives no token a probability: its weights are damaged, or its training diverged."


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is drawn. ``temperature`` 0 takes the most probable one."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    forbidden: tuple[int, ...] = ()
    """Token ids that are never drawn, such as <unk>."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-3 <= self.temperature < math.inf:
            raise UserError(f"The temperature is {self.temperature}, but must be 0 or at least 0.001: try 0.8.")
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, but must be above 0 and at most 1: try 0.9.")


def draw(log_probs: Tensor, options: SamplingOptions, generator: torch.Generator | None = None) -> int:
    """One token from (V,) log-probabilities."""
    uniform = torch.rand(1, dtype=torch.float64, generator=generator)
    return int(draw_rows(log_probs.double().cpu().unsqueeze(0), options, uniform))


def draw_rows(log_probs: Tensor, options: SamplingOptions, uniform: Tensor) -> Tensor:
    """One token for each row of (N, V), chosen by the row's ``uniform`` number in [0, 1): (N,)."""
    if bool(log_probs.isnan().any()):
        raise MachineError(NO_PROBABILITIES)
    if options.forbidden:
        vocabulary = log_probs.shape[-1]
        if outside := [token for token in options.forbidden if not 0 <= token < vocabulary]:
            raise UserError(f"The forbidden token {outside[0]} is outside the vocabulary of {vocabulary}: omit it.")
        if len(set(options.forbidden)) == vocabulary:
            raise UserError(f"All {vocabulary} tokens are forbidden, so none can be drawn: forbid fewer.")
        log_probs = log_probs.clone()
        log_probs[:, list(options.forbidden)] = -torch.inf
    if options.temperature == 0:
        return log_probs.argmax(-1)
    scores, order = log_probs / options.temperature, None  # (N, V)
    if options.top_k is not None:
        scores, order = scores.topk(min(options.top_k, scores.shape[-1]))  # (N, k), best first
    elif options.top_p is not None:
        scores, order = scores.sort(-1, descending=True)
    probabilities = scores.softmax(-1)
    if options.top_p is not None:
        outside_p = probabilities.cumsum(-1) - probabilities >= options.top_p  # the token that crosses the bound stays
        probabilities = probabilities.masked_fill(outside_p, 0.0)
    sums = probabilities.cumsum(-1)
    places = (sums <= uniform.unsqueeze(-1) * sums[:, -1:]).sum(-1)  # (N,)
    return places if order is None else order.gather(1, places.unsqueeze(1)).squeeze(1)
