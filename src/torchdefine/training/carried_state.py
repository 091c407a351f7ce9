"""What a context model carries from one segment to the next: tensors in nested lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def flat_tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, in order; None holds none."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for item in state.values() if isinstance(state, Mapping) else state:
            yield from flat_tensors(item)


def own_copy(state: Any) -> Any:
    """A copy of a state, every tensor in its own memory, for ``copy_state`` to write into.

    A model may return one tensor twice, or a part of a buffer that it keeps.
    """
    if isinstance(state, Tensor):
        return state.detach().clone()
    if state is None:
        return None
    if isinstance(state, Mapping):
        return {name: own_copy(item) for name, item in state.items()}
    items = [own_copy(item) for item in state]
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*items)
    return tuple(items) if isinstance(state, tuple) else items


def copy_state(held: Any, new: Any) -> None:
    """Write a state over another one, whose memory recorded work reads and writes.

    The new one may contain tensors of the old one at other places: these are copied before anything is written.
    """
    places = list(flat_tensors(held))
    memory = {place.untyped_storage().data_ptr() for place in places}
    given = [
        tensor.detach().clone() if tensor.untyped_storage().data_ptr() in memory else tensor.detach()
        for tensor in flat_tensors(new)
    ]
    for place, tensor in zip(places, given, strict=True):
        place.copy_(tensor)
