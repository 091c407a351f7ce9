"""The mode of a module, training or evaluation, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Put modules into evaluation mode; afterwards each of their parts is back in its own mode.

    Arguments that are not modules are left alone.
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
