"""The modes of a model: training or evaluation, and prepared or not for operations that take its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar, cast

from torch import nn

M = TypeVar("M", bound=nn.Module)


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


def twins(module: nn.Module, made: dict[nn.Module, nn.Module] | None = None) -> dict[nn.Module, nn.Module]:
    """For a module and each of its parts a new one, in evaluation mode, with the same weights, buffers and hooks."""
    made = {} if made is None else made
    if module not in made:
        twin = made[module] = module.__class__.__new__(module.__class__)
        twin.__dict__ = {**module.__dict__, "training": False, "_compiled_call_impl": None}
        for name in ("_parameters", "_buffers", "_modules"):
            twin.__dict__[name] = dict(module.__dict__[name])
        for name, part in twin.__dict__.items():  # some parts are referred to and not registered
            twin.__dict__[name] = _of_twins(part, made)
    return made


def _of_twins(value: Any, made: dict[nn.Module, nn.Module]) -> Any:
    """A value of a module with twins in the place of modules; itself where it refers to none."""
    if isinstance(value, nn.Module):
        return twins(value, made)[value]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _of_twins(value.__self__, made))
    if type(value) in (dict, list, tuple):
        own = list(value.values() if isinstance(value, dict) else value)
        others = [_of_twins(one, made) for one in own]
        if any(other is not one for one, other in zip(own, others, strict=True)):
            return dict(zip(value, others, strict=True)) if isinstance(value, dict) else type(value)(others)
    return value


def prepared_twin(model: M) -> M:
    """A twin that is prepared for fast operations."""
    made = twins(model)
    for twin in made.values():
        if isinstance(twin, Prepared):
            twin.prepare(True)
    return cast(M, made[model])


@contextmanager
def reading(model: Any) -> Iterator[Any]:
    """A model to be computed with: a twin in evaluation mode, prepared, so that whoever else uses the model, or trains
    it, in other threads too, does not notice; what is no module is left alone.
    """
    yield prepared_twin(model) if isinstance(model, nn.Module) else model


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
