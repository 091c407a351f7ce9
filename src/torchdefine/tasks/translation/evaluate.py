"""Perplexity of a translator: every target token counted once, given its source and the true tokens before it."""

from __future__ import annotations

import math

import torch

from torchdefine.data import BitextBatches, SentencePairs, TokenizerPair
from torchdefine.files import Progress
from torchdefine.modes import evaluating
from torchdefine.tasks.translation.model import Translator
from torchdefine.training.evaluation import Evaluation, arithmetic, perplexity


@torch.no_grad()
def evaluate_pairs(
    model: Translator,
    pairs: SentencePairs,
    tokenization: TokenizerPair,
    *,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> Evaluation:
    """Predict every token of the targets, each sentence's end included, in float32."""
    batches = BitextBatches(pairs, tokenization, batch_tokens, next(model.parameters()).device)
    with evaluating(model):
        total = torch.zeros((), dtype=torch.float64, device=batches.device)
        for number in range(batches.per_epoch):
            batch = batches.batch(number)
            hint = model.host_hint(batch.host_targets)
            losses, _ = model(batch.source, batch.inputs, batch.targets, None, reduction="sum", hint=hint)
            total += losses.cross_entropy.double()
            if progress is not None:
                progress(number + 1, batches.per_epoch)
    header = pairs.target.header
    nats = float(total)
    return Evaluation(
        tokens=header.tokens,
        loss=nats / header.tokens,
        perplexity=perplexity(nats / header.tokens),
        bits_per_byte=nats / math.log(2) / header.bytes if header.bytes else None,
        unknown_share=header.unknown / header.tokens,
        protocol="every target token predicted once from its source and the true tokens before it, ends of sentences "
        f"included, {arithmetic(model)}",
    )
