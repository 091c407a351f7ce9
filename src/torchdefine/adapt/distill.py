"""Self-distillation: a packed table learns, on plain text, to make the model behave as it did with its own table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdefine.adapt.behaviour import Behaviour
from torchdefine.adapt.kept import Kept, restore_steps, stored_steps
from torchdefine.config import Config, setting
from torchdefine.errors import MachineError
from torchdefine.files import Progress
from torchdefine.tables import CompactTable, DenseRows
from torchdefine.tables.low_rank import FactorisedRows
from torchdefine.tables.quantised import rounded_like

STEPS_BETWEEN = 20
"""Of a distillation that is kept, from one time to the next."""
OVERFLOWED = "Self-distillation overflowed: use a smaller rate."


@dataclass(frozen=True)
class Distillation(Config):
    """How long and how fast."""

    steps: int = setting(200, "Steps of one batch each.", at_least=1)
    lr: float = setting(3e-3, "Learning rate: by about this fraction of its magnitude a step moves a part.", above=0)
    bfloat16: bool = setting(False, "Whether the model computes in bfloat16; the table is exact.")
    seed: int = 0


def distill(
    behaviour: Behaviour,
    table: CompactTable,
    options: Distillation | None = None,
    progress: Progress | None = None,
    kept: Kept | None = None,
) -> list[float]:
    """Train the float parts of ``table`` in place, until the model's outputs are near those of its own table.

    Codes stay as they are, the model too; a quantised projection is trained as floats and rounded again. Returns the
    mean agreement of every step's batch, before the step. All random choices follow from the seed. With ``kept``, a
    later process goes on where this one ended, to the same numbers.
    """
    options = options or Distillation()
    batches, generator = len(behaviour.batches), torch.Generator().manual_seed(options.seed)
    rounds = [torch.randperm(batches, generator=generator) for _ in range(1 + options.steps // batches)]
    order = torch.cat(rounds)[: options.steps].tolist()  # every batch once in each round
    with loosened(table):
        parts = list(table.parameters())
        sizes = [max(float(part.detach().square().mean().sqrt()), 1e-4) for part in parts]
        groups = [{"params": [part], "lr": 0.0} for part in parts]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        found, done = kept.steps() if kept else ({}, 0)
        curve = restore_steps(optimizer, found) if done else []
        learning = Exact(table) if options.bfloat16 else table
        for step in range(done, options.steps):
            rate = options.lr * (1 + math.cos(math.pi * step / options.steps)) / 2
            for group, size in zip(optimizer.param_groups, sizes, strict=True):
                group["lr"] = rate * size
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(parts[0].device.type, torch.bfloat16, enabled=options.bfloat16):
                agreement = behaviour.agreements(learning, order[step]).mean()
            (1 - agreement).backward(inputs=parts)  # the model learns nothing
            optimizer.step()
            curve.append(agreement.detach())
            if kept and (step + 1) % STEPS_BETWEEN == 0:
                kept.keep_steps(stored_steps(optimizer, curve), step + 1)
            if progress:
                progress(step + 1, options.steps)
    if not all(torch.isfinite(part).all() for part in table.parameters()):
        raise MachineError(OVERFLOWED)
    return torch.stack(curve).tolist()


class Exact(nn.Module):
    """A table whose vectors are computed in its own precision within a model in bfloat16."""

    def __init__(self, table: CompactTable) -> None:
        super().__init__()
        self.table, self.num_embeddings, self.embedding_dim = table, table.num_embeddings, table.embedding_dim
        self.padding_idx = table.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, enabled=False):
            vectors: Tensor = self.table(ids)
        return vectors


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


@contextmanager
def loosened(table: CompactTable) -> Iterator[None]:
    """The table with float32 parts that learn; afterwards they are stored as they were, rounded projections too."""
    rounded = [
        (module, module.projection)
        for module in table.modules()
        if isinstance(module, FactorisedRows) and not isinstance(module.projection, DenseRows)
    ]
    for module, projection in rounded:
        module.projection = DenseRows.of(projection.matrix())
    stored = {name: (parameter.dtype, parameter.requires_grad) for name, parameter in table.named_parameters()}
    overflowed = False
    try:
        table.float().requires_grad_(True)
        yield
    finally:
        for name, parameter in table.named_parameters():
            dtype, learning = stored[name]
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(learning)
            parameter.grad = None
        for module, old in rounded:
            matrix = module.projection.matrix().detach()
            overflowed = overflowed or not bool(torch.isfinite(matrix.half()).all())
            module.projection = old if overflowed else rounded_like(old, matrix)
    if overflowed:
        raise MachineError(OVERFLOWED)
