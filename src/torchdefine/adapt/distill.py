"""Self-distillation: a packed table learns, on plain text, to make the model behave as it did with its own table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchdefine.adapt.behaviour import Behaviour
from torchdefine.config import Config, setting
from torchdefine.errors import MachineError
from torchdefine.files import Progress
from torchdefine.tables import CompactTable, DenseRows
from torchdefine.tables.low_rank import FactorisedRows
from torchdefine.tables.quantised import QuantisedRows, quantise_rows

OVERFLOWED = "Self-distillation overflowed: use a smaller rate."


@dataclass(frozen=True)
class Distillation(Config):
    """How long and how fast."""

    steps: int = setting(200, "Steps of one batch each.", at_least=1)
    lr: float = setting(3e-3, "Learning rate: by about this fraction of its magnitude a step moves a part.", above=0)
    seed: int = 0


def distill(
    behaviour: Behaviour,
    table: CompactTable,
    options: Distillation | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Train the float parts of ``table`` in place, until the model's outputs are near those of its own table.

    Codes stay as they are, the model too; a quantised projection is trained as floats and rounded again. Returns the
    mean cosine of every step's batch, before the step. All random choices follow from the seed.
    """
    options = options or Distillation()
    batches, generator = len(behaviour.batches), torch.Generator().manual_seed(options.seed)
    rounds = [torch.randperm(batches, generator=generator) for _ in range(1 + options.steps // batches)]
    order = torch.cat(rounds)[: options.steps].tolist()  # every batch once in each round
    cosines = []
    with loosened(table):
        parts = list(table.parameters())
        sizes = [max(float(part.detach().square().mean().sqrt()), 1e-4) for part in parts]
        groups = [{"params": [part], "lr": options.lr * size} for part, size in zip(parts, sizes, strict=True)]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        for step, index in enumerate(order):
            optimizer.zero_grad(set_to_none=True)
            cosine = behaviour.cosines(table, index).mean()
            (1 - cosine).backward(inputs=parts)  # the model learns nothing
            optimizer.step()
            schedule.step()
            cosines.append(cosine.detach())
            if progress:
                progress(step + 1, options.steps)
    if not all(torch.isfinite(part).all() for part in table.parameters()):
        raise MachineError(OVERFLOWED)
    return torch.stack(cosines).tolist()


@contextmanager
def loosened(table: CompactTable) -> Iterator[None]:
    """The table with float32 parts that learn; afterwards they are stored as they were, rounded projections too."""
    rounded = [
        (module, module.projection)
        for module in table.modules()
        if isinstance(module, FactorisedRows) and isinstance(module.projection, QuantisedRows)
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
            module.projection = old if overflowed else quantise_rows(matrix, old.bits, old.group_size)
    if overflowed:
        raise MachineError(OVERFLOWED)
