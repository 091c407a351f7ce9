"""A map whose table rests in host memory; rows in use, and those often used, are in a cache on the model's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.embedding.map import StandardMap, as_ids
from torchdefine.embedding.row_slots import Placed, Places, RowSlots
from torchdefine.errors import UserError, check_count


@dataclass(frozen=True)
class Fetched:
    """A batch of ids whose rows are in the cache, or on the way there."""

    ids: Tensor
    version: int
    pinned: Places
    slots: Tensor
    """Of every id."""
    padding: int | None
    """The slot of the padding row, if it is among them."""
    arrived: torch.cuda.Event | None


class HostMap(nn.Module):
    """A ``StandardMap`` in host memory under a model on a GPU: the vectors and the learning are the same.

    ``cache`` is the one parameter: rows lie there with the optimiser's numbers for them while batches need them, and
    go back when others need their slots. Its gradients are sparse. Saved, it is the standard map that it was made of.

    Args:
        table: the map to take over; its memory is used and not copied.
        cache_rows: rows on the device, at least the different ids of a batch, twice as many with ``prefetch``.
    """

    sparse = True
    resting: StandardMap
    """The whole table. Rows in the cache may be newer until ``flush``."""

    def __init__(self, table: StandardMap, cache_rows: int) -> None:
        super().__init__()
        if type(table) is not StandardMap:
            raise UserError(
                f"A HostMap is made of a StandardMap, not of a {type(table).__name__}: give it a standard one."
            )
        if table.bits is not None:
            raise UserError(f"A HostMap's rows are floats, but this table learns in {table.bits} bits: use bits=None.")
        check_count("cache_rows", cache_rows)
        table.sparse = True
        self.map_dim, self.output_dim, self.padding_idx = table.map_dim, table.output_dim, table.padding_idx
        object.__setattr__(self, "resting", table.cpu())  # around nn.Module, which would move it
        self._start(table.table.weight.new_zeros(cache_rows, self.map_dim))

    def _start(self, cache: Tensor) -> None:
        weight = self.resting.table.weight
        self.cache = nn.Parameter(cache, weight.requires_grad)
        self.num_embeddings, self.scale = self.resting.num_embeddings, self.resting.scale
        self._traffic = Traffic(weight.detach(), len(cache))

    def prefetch(self, ids: Tensor) -> Tensor:
        """Bring the rows of a batch into the cache while the device works; returns its ids on the device.

        Look up the very tensor that is returned, in the order of the calls: then nothing waits. Ids are best on the
        host; those on a GPU are waited for.
        """
        on_host, device = as_ids(ids.cpu(), self.num_embeddings), self.cache.device
        there = ids if ids.device == device else to_device(ids, device)
        self._traffic.fetch(self.cache, there, on_host, self.padding_idx)
        return there

    def forward(self, ids: Tensor, each_once: bool = False) -> Tensor:
        traffic = self._traffic
        found = traffic.fetched(ids)
        if found is None:
            ids = self.prefetch(ids)
            found = traffic.fetched(ids)
            assert found is not None
        traffic.use(found, torch.is_grad_enabled() and self.cache.requires_grad)
        if found.arrived is not None:
            torch.cuda.current_stream(self.cache.device).wait_event(found.arrived)
        vectors = F.embedding(found.slots, self.cache, found.padding, sparse=True)  # (…, n)
        return vectors * self.scale if self.scale != 1.0 else vectors

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn by this optimiser, fresh, of sparse gradients: its numbers for each row travel with the row.

        Its ``state_dict`` then has them for all rows, as if the table were on the device.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                "A table in host memory learns in one process only, as others have other rows in their caches: split "
                "the rows over the processes instead."
            )
        self._traffic.follow(optimizer, self.cache)

    def flush(self) -> None:
        """Write the rows in the cache back, so that ``resting`` has every row as it is now."""
        self._traffic.flush(self.cache)

    def reset_parameters(self, std: float | None = None) -> None:
        self._traffic.forget(self.cache)
        self.resting.reset_parameters(std)

    def resize(self, num_embeddings: int) -> None:
        """Change the number of rows; give the new parameter ``cache`` to a fresh optimiser to follow."""
        self.flush()
        self.resting.resize(num_embeddings)
        self._start(torch.zeros_like(self.cache))

    def to_config(self) -> dict[str, Any]:
        return self.resting.to_config()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.flush()
        destination[f"{prefix}table.weight"] = self.resting.table.weight.detach()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *problems: list[str]
    ) -> None:
        missing, _, errors = problems
        name, weight = f"{prefix}table.weight", self.resting.table.weight.detach()
        if name not in state_dict:
            missing.append(name)
        elif state_dict[name].shape != weight.shape:
            errors.append(f"{name} is {tuple(state_dict[name].shape)}, but the table {tuple(weight.shape)}")
        else:
            self._traffic.forget(self.cache)
            weight.copy_(state_dict[name])

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        self._traffic.forget(self.cache)
        super()._apply(fn, recurse)
        if self.cache.dtype != self.resting.table.weight.dtype:
            self.resting.to(self.cache.dtype)
            self._traffic.columns[""] = self.resting.table.weight.detach()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMap:
        """A copy follows no optimiser."""
        self.flush()
        copy = HostMap(deepcopy(self.resting, memo), len(self.cache))
        return copy.to(self.cache.device).train(self.training)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings:,} × {self.map_dim} in host memory, {len(self.cache):,} rows in the cache"


class Traffic:
    """Moves rows, with what an optimiser keeps for each of them, between host memory and a cache.

    On a GPU all of it goes through a stream of its own. A row that leaves is copied into host memory when the host
    next looks, so that the host does not wait for the device.
    """

    def __init__(self, table: Tensor, slots: int) -> None:
        self.columns: dict[str, Tensor] = {"": table}
        """In host memory, V rows each: the table, and by name what the optimiser keeps."""
        self.slots = RowSlots(len(table), slots)
        self.optimizer: torch.optim.Optimizer | None = None
        self._stream: torch.cuda.Stream | None = None
        self._fetched: list[Fetched] = []
        self._in_use: list[Places] = []
        """Slots with gradients that await the optimiser's step."""
        self._leaving: list[tuple[Tensor, Places, Tensor, torch.cuda.Event | None]] = []

    @torch.no_grad()
    def fetch(self, cache: Tensor, ids: Tensor, host_ids: Tensor, padding_idx: int | None) -> None:
        """Bring in the rows of ids, which are also given as the host has them."""
        rows, places = np.unique(host_ids.numpy(), return_inverse=True)
        self._settle()
        placed = self.slots.place(rows.astype(np.int64))
        arrived = self._move(cache, placed)
        slots = torch.from_numpy(placed.slots)[torch.from_numpy(places.reshape(host_ids.shape))]
        padding = -1 if padding_idx is None else int(self.slots.slot_of[padding_idx])
        there = to_device(slots, cache.device)
        self._fetched.append(
            Fetched(ids, version_of(ids), placed.slots, there, None if padding < 0 else padding, arrived)
        )

    def fetched(self, ids: Tensor) -> Fetched | None:
        """What was fetched for this very tensor, if it has not been written to since."""
        return next((f for f in self._fetched if f.ids is ids and f.version == version_of(ids)), None)

    def use(self, fetched: Fetched, learns: bool) -> None:
        """Look it up now. Where it learns, its slots stay until the optimiser's step; what was fetched before it and
        never looked up goes."""
        if learns and self.optimizer is None:
            raise UserError(
                "A table in host memory learns by an optimiser that it follows: call map.follow(optimizer), or look "
                "up within torch.no_grad()."
            )
        last = next(place for place, one in enumerate(self._fetched) if one is fetched)
        for other in self._fetched[:last]:
            self.slots.unpin(other.pinned)
        if learns:
            self._in_use.append(fetched.pinned)
        else:
            self.slots.unpin(fetched.pinned)
        del self._fetched[: last + 1]

    def _move(self, cache: Tensor, placed: Placed) -> torch.cuda.Event | None:
        with self._beside(cache.device):
            old_slots = to_device(torch.from_numpy(placed.old_slots), cache.device)
            new_slots = to_device(torch.from_numpy(placed.new_slots), cache.device)
            for there, resting in self._pairs(cache):
                if self.optimizer is not None and len(placed.old_rows):
                    self._leaving.append((resting, placed.old_rows, *to_host(there[old_slots])))
                there.index_copy_(0, new_slots, taken(resting, placed.new_rows, cache.device))
            if self._stream is None:
                return None
            arrived = torch.cuda.Event()
            arrived.record()
            return arrived

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """The stream of the rows, behind all that the device has been given so far."""
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def _settle(self) -> None:
        for resting, rows, values, copied in self._leaving:
            if copied is not None:
                copied.synchronize()
            resting.index_copy_(0, torch.from_numpy(rows), values)
        self._leaving.clear()

    @torch.no_grad()
    def flush(self, cache: Tensor) -> None:
        self._settle()
        if self.optimizer is None:
            return
        if self._stream is not None:
            torch.cuda.current_stream(cache.device).wait_stream(self._stream)
        slots, rows = map(torch.from_numpy, self.slots.held())
        for there, resting in self._pairs(cache):
            resting.index_copy_(0, rows, there[slots.to(there.device)].cpu())

    def forget(self, cache: Tensor) -> None:
        """Have no row in the cache, and so the newest ones in host memory."""
        self.flush(cache)
        self.slots.clear()
        self._fetched.clear()
        self._in_use.clear()

    def _pairs(self, cache: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The table and each column of the optimiser's state, as it is on the device and in host memory."""
        yield cache.detach(), self.columns[""]
        for name, there in self._row_states(cache).items():
            yield there, self.columns[name]

    def _row_states(self, cache: Tensor) -> dict[str, Tensor]:
        state = {} if self.optimizer is None else self.optimizer.state.get(cache, {})
        return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim}

    def follow(self, optimizer: torch.optim.Optimizer, cache: nn.Parameter) -> None:
        if any(isinstance(value, Tensor) for value in optimizer.state.get(cache, {}).values()):
            raise UserError(
                f"{type(optimizer).__name__} has numbers for the rows of the cache already: follow a fresh one of "
                "optim.sparse, RowwiseAdagrad or SparseAdam, and load its state afterwards."
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        place = next((place for place, parameter in enumerate(parameters) if parameter is cache), None)
        if place is None:
            raise UserError("The optimiser does not have the parameter cache of this map: give it map.parameters().")
        self.optimizer = optimizer

        def stepped(*_: Any) -> None:
            for name, value in self._row_states(cache).items():
                if value.is_sparse:
                    kind = type(optimizer).__name__
                    raise UserError(f"{kind} keeps sparse numbers, which do not travel with rows: set momentum to 0.")
                if name not in self.columns:
                    self.columns[name] = value.new_zeros(len(self.columns[""]), *value.shape[1:], device="cpu")
            for pinned in self._in_use:
                self.slots.unpin(pinned)
            self._in_use.clear()

        def saved(_: Any, whole: dict[str, Any]) -> dict[str, Any]:
            self.flush(cache)
            rows = {name: column for name, column in self.columns.items() if name}
            own = {**whole["state"].get(place, {}), **rows}
            return {**whole, "state": {**whole["state"], **({place: own} if own else {})}}

        def restored(_: Any, whole: dict[str, Any]) -> dict[str, Any]:
            self.forget(cache)
            own = dict(whole["state"].get(place, {}))
            for name, value in own.items():
                if isinstance(value, Tensor) and value.ndim:
                    self.columns[name] = value.detach().clone().cpu()
                    own[name] = value.new_zeros(len(cache), *value.shape[1:])
            return {**whole, "state": {**whole["state"], **({place: own} if own else {})}}

        optimizer.register_step_post_hook(stepped)
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(restored)


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def taken(column: Tensor, rows: Places, device: torch.device) -> Tensor:
    """Rows of a column, on the device, without waiting for it."""
    staged = column.new_empty(len(rows), *column.shape[1:], pin_memory=device.type == "cuda")
    torch.index_select(column, 0, torch.from_numpy(rows), out=staged)
    return staged.to(device, non_blocking=True)


def to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy in host memory and the moment, on a GPU, from which on it is whole."""
    if values.device.type != "cuda":
        return values, None
    staged = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return staged, copied
