"""Self-distillation: a packed table learns, on plain text, to make the model behave as it did with its own table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchdefine.adapt.behaviour import Behaviour
from torchdefine.errors import MachineError, UserError
from torchdefine.files import Progress
from torchdefine.tables import CompactTable, DenseRows
from torchdefine.tables.low_rank import FactorisedRows
from torchdefine.tables.quantised import QuantisedRows, quantise_rows

OVERFLOWED = "Self-distillation overflowed: use a smaller rate."


@dataclass(frozen=True)
class Distillation:
    """How long and how fast."""

    steps: int = 200
    lr: float = 3e-3
    """Relative to the size of each part: a step moves a part by about this fraction of its own magnitude."""
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
    if options.steps < 1 or options.lr <= 0:
        raise UserError(f"{options.steps} steps at a rate of {options.lr} teach nothing: use 200 and 3e-3, say.")
    batches, generator = len(behaviour.batches), torch.Generator().manual_seed(options.seed)
    rounds = [torch.randperm(batches, generator=generator) for _ in range(1 + options.steps // batches)]
    order = torch.cat(rounds)[: options.steps].tolist()  # every batch once in each round
    cosines = []
    with behaviour.frozen(), loosened(table):
        sizes = [max(float(part.detach().square().mean().sqrt()), 1e-4) for part in table.parameters()]
        groups = [
            {"params": [part], "lr": options.lr * size} for part, size in zip(table.parameters(), sizes, strict=True)
        ]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        for step, index in enumerate(order):
            optimizer.zero_grad(set_to_none=True)
            cosine = behaviour.cosines(table, index).mean()
            (1 - cosine).backward()
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
    try:
        table.float().requires_grad_(True)
        yield
    finally:
        trained = [module.projection.matrix().detach() for module, _ in rounded]
        fits = all(bool(torch.isfinite(matrix.half()).all()) for matrix in trained)
        for name, parameter in table.named_parameters():
            dtype, learning = stored[name]
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(learning)
            parameter.grad = None
        for (module, projection), matrix in zip(rounded, trained, strict=True):
            module.projection = quantise_rows(matrix, projection.bits, projection.group_size) if fits else projection
    if not fits:
        raise MachineError(OVERFLOWED)
