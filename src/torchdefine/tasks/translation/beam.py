"""Targets of a model that decodes step by step, by beam search or drawn: batched, cached, the same for every batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from torchdefine.config import Config, setting
from torchdefine.errors import MachineError
from torchdefine.modes import evaluating
from torchdefine.tasks.sampling import NO_PROBABILITIES, SamplingOptions, draw_rows


class StepModel(Protocol):
    """A model that reads sources once and then gives the next token's log-probabilities for every target.

    A beam keeps some rows of its state, and maybe of its sources, by ``state.select(rows, sources)``.
    """

    def start(self, source: Tensor, hypotheses: int = 1) -> Any: ...

    def step(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]: ...


@dataclass(frozen=True)
class TargetTokens:
    """The ids that a search needs."""

    bos: int
    eos: int
    pad: int
    """Of the source side: it fills the ends of short sources."""
    forbidden: tuple[int, ...] = ()
    """Ids that no target may contain, such as <pad>, <bos> and <unk>."""


@dataclass(frozen=True)
class BeamConfig(Config):
    """How to search. ``size`` 1 takes the most probable token at every step."""

    size: int = setting(4, "Hypotheses that beam search keeps; 1 is greedy.", at_least=1)
    length_penalty: float = setting(0.6, "Exponent of Wu's length penalty; 0 for none.", at_least=0, below=math.inf)
    max_ratio: float = setting(
        1.5, "A translation has at most this many tokens for each of the source's …", at_least=0, below=math.inf
    )
    max_extra: int = setting(10, "… and this many more.", at_least=1)
    batch_size: int = setting(64, "Sentences searched at once; changes speed, not the result.", at_least=1)

    def limit(self, source_length: int) -> int:
        """How many tokens the target of a source may have."""
        exactly = Fraction(str(self.max_ratio)) * source_length  # 0.29 · 100 is 29, but not in floats
        return int(exactly) + self.max_extra

    def score(self, log_prob: float, length: int) -> float:
        return log_prob * ((5 + length) / 6) ** -self.length_penalty  # does not overflow for any penalty


@dataclass(frozen=True)
class Hypothesis:
    """A target as ids, without ``<bos>`` and ``<eos>``."""

    ids: list[int]
    log_prob: float
    """Of all its tokens and of ``<eos>`` after them, in nats."""
    score: float
    """What hypotheses are ranked by."""


@dataclass
class _Search:
    """One source of a batch while it is searched."""

    place: int
    limit: int
    ended: list[Hypothesis] = field(default_factory=list)

    def is_done(self, length: int, best_going: float, options: BeamConfig, wanted: int) -> bool:
        """Whether no hypothesis that is still going can end among the ``wanted`` best.

        At best, a hypothesis reaches the longest length without losing any more log-probability.
        """
        if best_going == -math.inf or len(self.ended) >= options.size or length >= self.limit:
            return True
        if len(self.ended) < wanted:
            return False
        return options.score(best_going, self.limit) <= sorted(h.score for h in self.ended)[-wanted]

    def best(self, wanted: int) -> list[Hypothesis]:
        return sorted(self.ended, key=lambda hypothesis: -hypothesis.score)[:wanted]


@torch.no_grad()
def beam_search(
    model: StepModel,
    sources: Sequence[Sequence[int]],
    tokens: TargetTokens,
    options: BeamConfig | None = None,
    wanted: int | None = None,
) -> list[list[Hypothesis]]:
    """The best targets of each source, best first, up to ``wanted`` of them; all K = ``options.size`` by default.

    At every step the K best continuations of the K hypotheses are looked at: those among them that end are done, and
    the K best that do not end go on. A source is done when K hypotheses are, or when no other can still become one of
    the ``wanted`` best; at the longest length all must end.
    """
    if not sources:
        return []
    options = options or BeamConfig()
    with evaluating(model):
        return _searched(model, sources, tokens, options, options.size if wanted is None else wanted)


def _searched(
    model: StepModel, sources: Sequence[Sequence[int]], tokens: TargetTokens, options: BeamConfig, wanted: int
) -> list[list[Hypothesis]]:
    size, device = options.size, device_of(model)
    found: list[list[Hypothesis]] = [[] for _ in sources]
    searches = [_Search(place, options.limit(len(source))) for place, source in enumerate(sources)]
    state = model.start(padded_sources(sources, tokens.pad, device), size)
    sums = torch.full((len(sources), size), -torch.inf, dtype=torch.float64, device=device)  # (B, K)
    sums[:, 0] = 0.0  # all hypotheses begin alike, so only one of them counts
    history = torch.full((len(sources), size, 1), tokens.bos, device=device)  # (B, K, t)
    while searches:
        log_probs, state = model.step(history[:, :, -1].reshape(-1), state)  # (B · K, V)
        log_probs = _allowed(log_probs.unflatten(0, sums.shape), searches, history.shape[2], tokens)  # (B, K, V)
        values, parents, ids = _best(sums, log_probs, 2 * size)  # each (B, 2K)
        _note_ended(searches, history, (values, parents, ids), tokens.eos, options)
        # At most K of the 2K continuations end, one per hypothesis, so K others are always left.
        others = torch.where(ids == tokens.eos, -torch.inf, values)  # (B, 2K)
        sums, chosen = others.topk(size)  # (B, K)
        parents, ids = parents.gather(1, chosen), ids.gather(1, chosen)
        going = [
            index
            for index, (search, best) in enumerate(zip(searches, sums[:, 0].tolist(), strict=True))
            if not search.is_done(history.shape[2], best, options, wanted)
        ]
        for index in set(range(len(searches))) - set(going):
            if not searches[index].ended:  # even the longest target must end, unless nothing is finite
                raise MachineError(NO_PROBABILITIES)
            found[searches[index].place] = searches[index].best(wanted)
        some_ended = len(going) < len(searches)
        searches = [searches[index] for index in going]
        kept = torch.tensor(going, dtype=torch.long, device=device)  # (B',)
        sums, parents, ids = sums[kept], parents[kept], ids[kept]
        history = torch.cat((history[kept[:, None], parents], ids.unsqueeze(-1)), dim=2)  # (B', K, t + 1)
        state = state.select((kept[:, None] * size + parents).reshape(-1), kept if some_ended else None)
    return found


@torch.no_grad()
def sample_targets(
    model: StepModel,
    sources: Sequence[Sequence[int]],
    tokens: TargetTokens,
    options: SamplingOptions,
    limits: BeamConfig,
    seeds: Sequence[int],
    count: int = 1,
) -> list[list[Hypothesis]]:
    """Draw ``count`` targets for each source; a source's draws depend on its own seed alone. Most probable first."""
    if not sources:
        return []
    device = device_of(model)
    longest = [limits.limit(len(source)) for source in sources for _ in range(count)]
    rows = len(longest)
    uniform = torch.zeros(rows, max(longest), dtype=torch.float64)
    for place, seed in enumerate(seeds):
        random = np.random.default_rng(seed)
        for row in range(place * count, (place + 1) * count):
            uniform[row, : longest[row]] = torch.from_numpy(random.random(longest[row]))
    uniform = uniform.to(device)
    ends = torch.tensor(longest, device=device)
    with evaluating(model):
        state = model.start(padded_sources(sources, tokens.pad, device), count)
        ids = torch.full((rows,), tokens.bos, device=device)
        sums = torch.zeros(rows, dtype=torch.float64, device=device)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        drawn: list[Tensor] = []
        while not bool(ended.all()):
            log_probs, state = model.step(ids, state)
            log_probs = log_probs.double()  # (N, V)
            if tokens.forbidden:
                log_probs[:, list(tokens.forbidden)] = -torch.inf
            ids = draw_rows(log_probs, options, uniform[:, len(drawn)])
            ids = torch.where(ended | (len(drawn) + 1 == ends), tokens.eos, ids)
            sums += torch.where(ended, 0.0, log_probs.gather(1, ids.unsqueeze(1)).squeeze(1))
            ended = ended | (ids == tokens.eos)
            drawn.append(ids)
    targets = [row[: row.index(tokens.eos)] for row in torch.stack(drawn, dim=1).tolist()]
    hypotheses = [
        Hypothesis(target, log_prob, limits.score(log_prob, len(target) + 1))
        for target, log_prob in zip(targets, sums.tolist(), strict=True)
    ]
    return [
        sorted(hypotheses[at : at + count], key=lambda hypothesis: -hypothesis.log_prob) for at in range(0, rows, count)
    ]


def padded_sources(sources: Sequence[Sequence[int]], pad: int, device: torch.device) -> Tensor:
    """(B, S) ids, filled up with ``pad``."""
    longest = max(len(source) for source in sources)
    return torch.tensor([[*source, *[pad] * (longest - len(source))] for source in sources], device=device)


def device_of(model: StepModel) -> torch.device:
    """Where a model's weights are; the CPU for one without any."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def _allowed(log_probs: Tensor, searches: list[_Search], length: int, tokens: TargetTokens) -> Tensor:
    """(B, K, V) without tokens that must not come next: forbidden ones, and at the length limit all but ``<eos>``."""
    if tokens.forbidden:
        log_probs[:, :, list(tokens.forbidden)] = -torch.inf
    last = [index for index, search in enumerate(searches) if search.limit == length]
    if last:
        ending = log_probs[last, :, tokens.eos]
        log_probs[last] = -torch.inf
        log_probs[last, :, tokens.eos] = ending
    return log_probs


def _best(sums: Tensor, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` best of (B, K) · (B, K, V) continuations: values, hypotheses and tokens, each (B, count)."""
    each = log_probs.topk(min(count, log_probs.shape[2]))  # (B, K, c): the best of all are among these
    totals = (sums.unsqueeze(-1) + each.values.double()).flatten(1)  # (B, K · c)
    values, places = totals.topk(min(count, totals.shape[1]))
    return values, places // each.values.shape[2], each.indices.flatten(1).gather(1, places)


def _note_ended(
    searches: list[_Search],
    history: Tensor,
    best: tuple[Tensor, Tensor, Tensor],
    eos: int,
    options: BeamConfig,
) -> None:
    """Record the hypotheses that end now: those whose ``<eos>`` is among the K best continuations."""
    values, parents, ids = (part[:, : options.size] for part in best)
    ending = ((ids == eos) & (values > -torch.inf)).nonzero().tolist()
    if not ending:
        return
    rows, columns = zip(*ending, strict=True)
    log_probs = values[rows, columns].tolist()
    targets = history[list(rows), parents[rows, columns], 1:].tolist()
    for row, log_prob, target in zip(rows, log_probs, targets, strict=True):
        score = options.score(log_prob, len(target) + 1)
        searches[row].ended.append(Hypothesis(target, log_prob, score))
