"""Drawing targets from a model that decodes step by step, with the same draws for every batch size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchdefine.decoding.beam import BeamOptions, Hypothesis, StepModel, TargetTokens, device_of, padded_sources
from torchdefine.decoding.sampling import SamplingOptions, draw_rows
from torchdefine.modes import evaluating


@torch.no_grad()
def sample_targets(
    model: StepModel,
    sources: Sequence[Sequence[int]],
    tokens: TargetTokens,
    options: SamplingOptions,
    limits: BeamOptions,
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
