"""The arithmetic that a step runs in: mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

SCALE_TOO_SMALL = 2.0**-12


class Precision:
    """Autocast and loss scaling of a run. A CPU always computes in fp32; ``note`` then says so."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.note = ""
        if device.type != "cuda" and name != "fp32":
            self.note = f"The precision {name} is for GPUs; on the {device.type} this run computes in fp32."
            name = "fp32"
        self.name = name
        self.device = device
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    @contextmanager
    def matmul_mode(self) -> Iterator[None]:
        """Whether fp32 products may use TF32 for the length of a run."""
        if self.device.type != "cuda":
            yield
            return
        products, recurrence = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, recurrence.allow_tf32
        products.allow_tf32 = recurrence.allow_tf32 = self.name != "fp32"
        try:
            yield
        finally:
            products.allow_tf32, recurrence.allow_tf32 = before

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def scale_collapsed(self) -> bool:
        """Whether loss scaling has run out of room: the gradients overflow however small the scale. Asks the device."""
        return self.scaler.is_enabled() and self.scaler.get_scale() < SCALE_TOO_SMALL
