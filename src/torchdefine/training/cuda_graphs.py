"""Work that comes to a GPU again and again, recorded as CUDA graphs, and the state that it carries from call to call.

A step of a language model is some hundred small kernels, and starting them takes longer than running them. So each kind
of step, with the same shapes, is recorded when it comes a second time and replayed from then on: a single launch, the
same kernels, the same numbers, the random ones included.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torchdefine.output.layer import HostHint

MOST_GRAPHS = 256  # beyond that many kinds of steps, the rest run kernel by kernel

log = logging.getLogger(__name__)

Inputs = Sequence[tuple[Tensor, ...]]
Hint = HostHint | None
"""What a model's ``host_hint`` returned for the targets."""
Recorded = tuple[torch.cuda.CUDAGraph, list[tuple[Tensor, ...]]]
"""A CUDA graph and the inputs that it reads."""


class CudaGraphs:
    """Runs a kind of work once directly, so that everything is warm, and as a CUDA graph from the second time on.

    ``compute`` takes inputs, each with its hint, and puts all results into tensors that existed before. ``afterwards``
    is called when something was recorded: memory allocated meanwhile belongs to the graph.
    """

    def __init__(
        self,
        compute: Callable[[Inputs, Sequence[Hint]], None],
        device: torch.device,
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        self.compute, self.device, self.afterwards = compute, device, afterwards
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one at a time, so they share their memory
        self._recorded: dict[tuple[Any, ...], Recorded | None] = {}
        self._works = True

    def __call__(self, inputs: Inputs, hints: Sequence[Hint]) -> None:
        with torch.cuda.device(self.device):  # a graph records what happens on the current device
            self._run(inputs, [with_room(hint) for hint in hints])

    def _run(self, inputs: Inputs, hints: Sequence[Hint]) -> None:
        kind = (*(tuple(t.shape for t in given) for given in inputs), *hints)
        if kind not in self._recorded or not self._works:
            if self._works and len(self._recorded) < MOST_GRAPHS:
                self._recorded[kind] = None
            self.compute(inputs, hints)
            return
        recorded = self._recorded[kind]
        if recorded is None:
            recorded = self._recorded[kind] = self._record(inputs, hints)
        if recorded is None:
            self.compute(inputs, hints)
            return
        graph, held = recorded
        for mine, new in zip(flat_tensors(held), flat_tensors(inputs), strict=True):
            mine.copy_(new)
        graph.replay()

    @property
    def recorded_kinds(self) -> int:
        return sum(recorded is not None for recorded in self._recorded.values())

    def _record(self, inputs: Inputs, hints: Sequence[Hint]) -> Recorded | None:
        held = own_copy(list(inputs))
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.stream(torch.cuda.current_stream())  # a failed recording would leave its own in place
        try:
            with stream, _without_garbage_collection(), torch.cuda.graph(graph, pool=self._pool):
                self.compute(held, hints)
        except RuntimeError as error:
            self._works = False
            _end_failed_recording(self.device, self._pool)
            reason = str(error).splitlines()[0]
            log.warning("Steps run without CUDA graphs, which is slower: %s", reason)
            return None
        finally:
            self.afterwards()
        return graph, held


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Nothing may be freed on the device during a recording, but garbage collection frees an earlier run's graphs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _end_failed_recording(device: torch.device, pool: tuple[int, int]) -> None:
    """Restore the sources of memory and random numbers, which torch leaves as if still recording."""
    index = torch.cuda.current_device() if device.index is None else device.index
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)  # torch before 2.8 has another name for it
    (end or torch._C._cuda_endAllocateCurrentStreamToPool)(index, pool)  # type: ignore[attr-defined]
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


def with_room(hint: Hint) -> Hint:
    """A hint with its numbers rounded up."""
    if hint is None:
        return None
    return HostHint(
        None if hint.distinct is None else room_for(hint.distinct),
        None if hint.bands is None else tuple(map(room_for, hint.bands)),
    )


def room_for(count: int) -> int:
    """A round number that is at least ``count`` and at most half as much again, so that few kinds of steps differ.

    Large counts vary less from step to step, and their spare room costs more: it is an eighth as much again, at most.
    """
    if count <= 16:
        return 16
    grain = 1 << (count.bit_length() - (2 if count <= 1024 else 4))
    return -(-count // grain) * grain


def flat_tensors(state: Any) -> list[Tensor]:
    """The tensors of a carried state, in order: they lie in lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def own_copy(state: Any) -> Any:
    """A copy of a state, every tensor in its own memory, for ``copy_state`` to write into.

    A model may return one tensor twice, or a part of a buffer that it keeps.
    """
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)


def copy_state(held: Any, new: Any) -> None:
    """Write a state over another one, whose memory recorded work reads and writes.

    The new one may contain tensors of the old one at other places: these are copied before anything is written.
    """
    places = flat_tensors(held)
    memory = {place.untyped_storage().data_ptr() for place in places}
    given = [
        tensor.detach().clone() if tensor.untyped_storage().data_ptr() in memory else tensor.detach()
        for tensor in flat_tensors(new)
    ]
    for place, tensor in zip(places, given, strict=True):
        place.copy_(tensor)
