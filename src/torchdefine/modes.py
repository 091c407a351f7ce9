"""The modes of a model: training or evaluation, and prepared or not for operations that take its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class Prepared(nn.Module):
    """A module whose forward may be taken over by operations that do the work of its parts all at once.

    Whether they may is decided when it is prepared, not in every forward: not where a part is ``untouched`` no longer.
    A module that nobody prepared calls all of its parts.
    """

    fused = False
    """Whether operations may take the weights of its parts instead of calling them."""

    def prepare(self, on: bool = True) -> None:
        raise NotImplementedError


def untouched(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether all parts of a module are of these kinds, and neither they nor itself have a hook or another forward.

    Layers and hooks of somebody else must see every token.
    """
    return all(
        (part is module or type(part) in (*kinds, nn.ModuleList, nn.ParameterList))
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__)
        for part in module.modules()
    )


def prepare(model: object, on: bool = True) -> None:
    """Prepare a model's parts for fast operations as it is now, or end that; hooks added later are not called."""
    for part in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, Prepared):
            part.prepare(on)


@contextmanager
def evaluating(*models: object) -> Iterator[None]:
    """Put modules into evaluation mode, prepared; afterwards each of their parts is back in its own mode.

    Arguments that are not modules are left alone.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    parts = [part for module in modules for part in module.modules()]
    training = [part for part in parts if part.training]
    before = [(part, part.fused) for part in parts if isinstance(part, Prepared)]
    for module in modules:
        module.eval()
        prepare(module)
    try:
        yield
    finally:
        for part in training:
            part.training = True
        for part, was in before:
            part.prepare(was)
