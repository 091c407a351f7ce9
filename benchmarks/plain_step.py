"""A training step as one writes it without further thought: the measure of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.ops import plain_torch
from torchdefine.training.precision import Precision


class PlainModel(nn.Module):
    """Embedding, context model and output layer, one after the other; ``loss`` is a module of hidden and targets."""

    def __init__(self, embedding: nn.Module, context: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.embedding, self.context, self.loss = embedding, context, loss

    def forward(self, ids: Tensor, targets: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, state = self.context(self.embedding(ids), state)
        return self.loss(hidden, targets), state


class PlainStep:
    """Forward under autocast, backward, clip, optimiser: each kernel started by itself, as torch does by default."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Tensor, ...],
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        clip: float | None,
    ) -> None:
        self.model, self.inputs, self.optimizer = model, inputs, optimizer
        self.precision, self.clip = precision, clip
        self.state: Any = None

    def __call__(self) -> Tensor:
        with plain_torch():  # parts of ours that it borrows are to run without kernels of ours too
            return self._step()

    def _step(self) -> Tensor:
        scaler = self.precision.scaler
        self.optimizer.zero_grad()
        with self.precision.autocast():
            loss, self.state = self.model(*self.inputs, self.state)
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        scaler.step(self.optimizer)
        scaler.update()
        return loss.detach()


def in_plain_torch(work: Callable[[], object]) -> Callable[[], object]:
    def plainly() -> object:
        with plain_torch():
            return work()

    return plainly


class TorchAdaptiveLoss(nn.Module):
    """torch's own adaptive softmax, which has tables of its own."""

    def __init__(self, hidden_dim: int, num_embeddings: int, cutoffs: tuple[int, ...], division: float = 4.0) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(hidden_dim, num_embeddings, list(cutoffs), div_value=division)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        # Under autocast it mixes dtypes of its own making unless it begins in full precision.
        loss: Tensor = self.softmax(hidden.flatten(0, -2).float(), targets.flatten()).loss
        return loss
