"""Targets of a translator by beam search or drawn: batched, cached, the same for every batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from torchdefine.config import Config, setting
from torchdefine.errors import MachineError
from torchdefine.modes import reading
from torchdefine.tasks.sampling import NO_PROBABILITIES, SamplingOptions, draw_rows
from torchdefine.tasks.translation.model import Translator


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

    size: int = setting(4, "Size of the beam; 1 is greedy search.", at_least=1)
    length_penalty: float = setting(
        0.6, "Exponent of the length penalty of Wu et al.; 0 is no penalty.", at_least=0, below=math.inf
    )
    max_ratio: float = setting(
        1.5, "A translation has at most max_ratio × the source's tokens + max_extra.", at_least=0, below=math.inf
    )
    max_extra: int = setting(10, "Tokens that a translation may have beyond max_ratio × the source's.", at_least=1)
    batch_size: int = setting(
        64, "Sentences per batch of the search; it changes the speed, not the result.", at_least=1
    )

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


@torch.no_grad()
def beam_search(
    model: Translator,
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
    size, wanted, device = options.size, wanted or options.size, next(model.parameters()).device
    found: list[list[Hypothesis]] = [[] for _ in sources]
    searches = [_Search(place, options.limit(len(source))) for place, source in enumerate(sources)]
    sums = torch.full((len(sources), size), -torch.inf, dtype=torch.float64, device=device)  # (B, K)
    sums[:, 0] = 0.0  # all hypotheses begin alike, so only one of them counts
    history = torch.full((len(sources), size, 1), tokens.bos, device=device)  # (B, K, t)
    with reading(model) as model:
        state = model.start(_padded(sources, tokens.pad, device), size)
        while searches:
            length = history.shape[2]
            log_probs, state = model.step(history[:, :, -1].reshape(-1), state)  # (B · K, V)
            log_probs = log_probs.unflatten(0, sums.shape)  # (B, K, V)
            _forbid(log_probs, [index for index, search in enumerate(searches) if search.limit == length], tokens)
            values, parents, ids = _best(sums, log_probs, 2 * size)  # each (B, 2K)
            _note_ended(searches, history, (values, parents, ids), tokens.eos, options)
            # At most K of the 2K continuations end, one per hypothesis, so K others are always left.
            sums, chosen = torch.where(ids == tokens.eos, -torch.inf, values).topk(size)  # (B, K)
            parents, ids = parents.gather(1, chosen), ids.gather(1, chosen)
            going = []
            for index, (search, best) in enumerate(zip(searches, sums[:, 0].tolist(), strict=True)):
                if not search.is_done(length, best, options, wanted):
                    going.append(index)
                elif not search.ended:  # even the longest target must end, unless nothing is finite
                    raise MachineError(NO_PROBABILITIES)
                else:
                    found[search.place] = sorted(search.ended, key=lambda hypothesis: -hypothesis.score)[:wanted]
            some_ended = len(going) < len(searches)
            searches = [searches[index] for index in going]
            kept = torch.tensor(going, dtype=torch.long, device=device)  # (B',)
            sums, parents, ids = sums[kept], parents[kept], ids[kept]
            history = torch.cat((history[kept[:, None], parents], ids.unsqueeze(-1)), dim=2)  # (B', K, t + 1)
            state = state.select((kept[:, None] * size + parents).reshape(-1), kept if some_ended else None)
    return found


@torch.no_grad()
def sample_targets(
    model: Translator,
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
    device = next(model.parameters()).device
    longest = [limits.limit(len(source)) for source in sources for _ in range(count)]
    uniform = torch.zeros(len(longest), max(longest), dtype=torch.float64)
    for place, seed in enumerate(seeds):
        random = np.random.default_rng(seed)
        for row in range(place * count, (place + 1) * count):
            uniform[row, : longest[row]] = torch.from_numpy(random.random(longest[row]))
    uniform, ends = uniform.to(device), torch.tensor(longest, device=device)
    ids = torch.full((len(longest),), tokens.bos, device=device)
    sums = torch.zeros(len(longest), dtype=torch.float64, device=device)
    ended = torch.zeros(len(longest), dtype=torch.bool, device=device)
    drawn: list[Tensor] = []
    with reading(model) as model:
        state = model.start(_padded(sources, tokens.pad, device), count)
        while not bool(ended.all()):
            log_probs, state = model.step(ids, state)
            log_probs = log_probs.double()  # (N, V)
            log_probs[:, list(tokens.forbidden)] = -torch.inf
            ids = draw_rows(log_probs, options, uniform[:, len(drawn)])
            ids = torch.where(ended | (len(drawn) + 1 == ends), tokens.eos, ids)
            sums += torch.where(ended, 0.0, log_probs.gather(1, ids.unsqueeze(1)).squeeze(1))
            ended = ended | (ids == tokens.eos)
            drawn.append(ids)
    found: list[list[Hypothesis]] = [[] for _ in sources]
    for row, (target, log_prob) in enumerate(zip(torch.stack(drawn, dim=1).tolist(), sums.tolist(), strict=True)):
        target = target[: target.index(tokens.eos)]
        found[row // count].append(Hypothesis(target, log_prob, limits.score(log_prob, len(target) + 1)))
    return [sorted(hypotheses, key=lambda hypothesis: -hypothesis.log_prob) for hypotheses in found]


def _padded(sources: Sequence[Sequence[int]], pad: int, device: torch.device) -> Tensor:
    """(B, S) ids, filled up with ``pad``."""
    longest = max(len(source) for source in sources)
    return torch.tensor([[*source, *[pad] * (longest - len(source))] for source in sources], device=device)


def _forbid(log_probs: Tensor, last: list[int], tokens: TargetTokens) -> None:
    """Rule out what must not come next, in (B, K, V): forbidden tokens, and all but ``<eos>`` in the rows ``last``."""
    log_probs[:, :, list(tokens.forbidden)] = -torch.inf
    if last:
        ending = log_probs[last, :, tokens.eos]
        log_probs[last] = -torch.inf
        log_probs[last, :, tokens.eos] = ending


def _best(sums: Tensor, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` best of (B, K) · (B, K, V) continuations: values, hypotheses and tokens, each (B, count)."""
    each = log_probs.topk(min(count, log_probs.shape[2]))  # (B, K, c): the best of all are among these
    totals = (sums.unsqueeze(-1) + each.values.double()).flatten(1)  # (B, K · c)
    values, places = totals.topk(min(count, totals.shape[1]))
    return values, places // each.values.shape[2], each.indices.flatten(1).gather(1, places)


def _note_ended(
    searches: list[_Search], history: Tensor, best: tuple[Tensor, Tensor, Tensor], eos: int, options: BeamConfig
) -> None:
    """Record the hypotheses that end now: those whose ``<eos>`` is among the K best continuations."""
    values, parents, ids = (part[:, : options.size] for part in best)
    rows, columns = ((ids == eos) & (values > -torch.inf)).nonzero(as_tuple=True)
    if not len(rows):
        return
    log_probs, targets = values[rows, columns].tolist(), history[rows, parents[rows, columns], 1:].tolist()
    for row, log_prob, target in zip(rows.tolist(), log_probs, targets, strict=True):
        searches[row].ended.append(Hypothesis(target, log_prob, options.score(log_prob, len(target) + 1)))
