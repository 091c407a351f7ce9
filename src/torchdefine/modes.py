"""The mode of a module, training or evaluation, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Have modules evaluate; afterwards each of their parts is in the mode it was in, which may not be the whole's.

    What is no module has no modes.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
