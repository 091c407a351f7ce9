"""The neural cache: at test time, words that followed similar hidden vectors become more probable (Grave et al., 2017).

Nothing is trained. p = (1 - weight) p_model + weight p_cache, where p_cache(word) adds up softmax(theta h·h_i) over
those of the last ``window`` positions i that were followed by the word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from torchdefine.config import Config, setting
from torchdefine.context import State
from torchdefine.data import IGNORE
from torchdefine.errors import UserError
from torchdefine.output import HostHint, Losses
from torchdefine.spelling import option
from torchdefine.tasks.language.model import LanguageModel

WINDOWS = (100, 500, 1000, 2000, 3785)
THETAS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
WEIGHTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
"""What tuning tries."""


@dataclass(frozen=True)
class NeuralCache(Config):
    """How far back the cache looks, how sharply it compares, and the weight of its probability."""

    window: int = setting(500, "Number of earlier positions in the cache.", at_least=1)
    theta: float = setting(1.0, "Factor on the dot products of hidden vectors.", at_least=0, below=math.inf)
    weight: float = setting(
        0.1, "Weight of the cache's probability in the mixture with the model's.", at_least=0, below=1
    )

    @classmethod
    def of(cls, text: str) -> NeuralCache:
        """From three numbers, as in 500,1.0,0.1."""
        values = text.split(",")
        if len(values) != 3:
            name = option("neural_cache")
            raise UserError(f"{name} is {text!r}, but must be three numbers, as in 500,1.0,0.1.")
        return cls.read(dict(zip(("window", "theta", "weight"), values, strict=True)), "neural_cache")

    def __str__(self) -> str:
        return f"a neural cache of {self.window} positions, theta {self.theta:g}, weight {self.weight:g}"


@dataclass
class Seen:
    """What a cache remembers of its text; one for the model and for its twins, which evaluate it."""

    nats: Tensor | None = None  # (choices,): of all targets so far
    keys: Tensor | None = None  # (B, W, d): the last hidden vectors
    words: Tensor | None = None  # (B, W): what followed them


class CachedModel(nn.Module):
    """A language model with a neural cache, to be evaluated; of several, its losses are those of the first.

    Hidden vectors are compared once for all of them. Make one for each text, since it remembers what it saw.
    """

    def __init__(self, model: LanguageModel, choices: Sequence[NeuralCache]) -> None:
        super().__init__()
        self.model: LanguageModel = model
        self.initial_state, self.host_hint, self.carried = model.initial_state, model.host_hint, model.carried
        self.choices, self.window = choices, max(choice.window for choice in choices)
        self.seen = Seen()

    @property
    def best(self) -> NeuralCache:
        """The cache that made the targets so far most probable."""
        assert self.seen.nats is not None
        return self.choices[int(self.seen.nats.argmin())]

    def forward(
        self, ids: Tensor, targets: Tensor, state: State, reduction: Literal["sum"], hint: HostHint | None = None
    ) -> tuple[Losses, State]:
        distinct, bands = hint or HostHint()
        hidden, state = self.model.hidden(ids, state, distinct)  # (B, T, d)
        losses = self.model.output.loss(hidden, targets, reduction="none", hint=bands)  # (B, T)
        seen = self.seen
        begins = seen.keys is None  # the first position of a text has nothing to look back at
        keys = hidden if seen.keys is None else torch.cat((seen.keys, hidden), 1)  # (B, W + T, d)
        words = targets if seen.words is None else torch.cat((seen.words, targets), 1)  # (B, W + T)
        scores = hidden @ keys.transpose(1, 2)  # (B, T, W + T)
        follows = words.unsqueeze(1) == targets.unsqueeze(2)  # (B, T, W + T)
        settings = {(choice.window, choice.theta) for choice in self.choices}
        cached = {setting: _cache_probability(scores, follows, *setting) for setting in settings}
        nats = []
        for choice in self.choices:
            mixed = losses.clone()  # (B, T)
            if choice.weight:
                found = math.log(choice.weight) + cached[choice.window, choice.theta].log()
                mixed = -torch.logaddexp(math.log1p(-choice.weight) - losses, found)
            if begins:
                mixed[:, 0] = losses[:, 0]
            nats.append(mixed[targets != IGNORE].double().sum())
        seen.keys, seen.words = keys[:, -self.window :], words[:, -self.window :]
        seen.nats = torch.stack(nats) if seen.nats is None else seen.nats + torch.stack(nats)
        return Losses(nats[0], nats[0]), state


def _cache_probability(scores: Tensor, follows: Tensor, window: int, theta: float) -> Tensor:
    """p_cache of every target, (B, T), from the scores of all columns and whether the target followed them."""
    length, width = scores.shape[1:]
    own = torch.arange(width - length, width, device=scores.device).unsqueeze(1)  # each position's own column
    columns = torch.arange(width, device=scores.device)
    reachable = (columns < own) & (columns >= own - window)  # (T, W + T)
    weights = (theta * scores).masked_fill(~reachable, -math.inf).softmax(-1)
    return torch.where(follows & reachable, weights, 0.0).sum(-1)
