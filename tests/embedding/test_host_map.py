"""A table in host memory behind a cache learns what the same table learns as a whole on the device."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchdefine import AdaptiveMap, DeFINE, DeFINEBag, HostMap, StandardMap
from torchdefine.embedding.row_slots import RowSlots
from torchdefine.errors import UserError
from torchdefine.training import OPTIMIZERS
from torchdefine.training.optimizers import RowwiseAdagrad, clip_gradients

V, N, M, CACHE = 60, 4, 12, 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CPU = torch.device("cpu")


def embedding(host: bool, device: str = "cpu", padding_idx: int | None = 7, cache_rows: int = CACHE) -> DeFINE:
    torch.manual_seed(3)
    table: Any = StandardMap(V, N, padding_idx, scale=0.5, sparse=True).double()
    defined = DeFINE.over(HostMap(table, cache_rows) if host else table, M, expand_dim=16).double()
    return defined.to(device)


def optimizer_of(model: DeFINE, kind: str) -> torch.optim.Optimizer:
    config = OPTIMIZERS.read({"kind": "adam", "lr": 0.05, "sparse": kind})
    table = model.map.cache if isinstance(model.map, HostMap) else model.map.table.weight
    optimizer = config.build_with_tables(model.parameters(), [table], CPU)
    if isinstance(model.map, HostMap):
        model.map.follow(optimizer)
    return optimizer


def batches(count: int, seed: int = 0) -> list[Tensor]:
    """Of at most ten different ids."""
    draw = np.random.default_rng(seed)
    return [torch.from_numpy(draw.choice(draw.permutation(V)[:10], (3, 5))) for _ in range(count)]


def step(model: DeFINE, optimizer: torch.optim.Optimizer, *parts: Tensor) -> float:
    optimizer.zero_grad()
    losses = [(model(ids) - 1).pow(2).mean() for ids in parts]
    sum(losses).backward()  # type: ignore[union-attr]
    clip_gradients(model.parameters(), 0.1)
    optimizer.step()
    return losses[0].item()


def same(one: dict[str, Any], other: dict[str, Any], rtol: float = 1e-10) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            same(value, other[name], rtol)
        elif isinstance(value, Tensor):
            torch.testing.assert_close(value.cpu(), other[name].cpu(), rtol=rtol, atol=rtol / 100, msg=str(name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["rowwise-adagrad", "sparse-adam"])
def test_it_learns_what_the_whole_table_learns(kind: str, device: str) -> None:
    whole, ours = embedding(False), embedding(True, device)
    theirs, own = optimizer_of(whole, kind), optimizer_of(ours, kind)
    given = batches(20)
    rtol = 1e-10 if device == "cpu" else 1e-7
    there = ours.map.prefetch(given[0])
    for now, following in pairwise(given):
        ids, there = there, ours.map.prefetch(following)
        assert step(ours, own, ids) == pytest.approx(step(whole, theirs, now), rel=rtol)
    for first, second in zip(given[::2], given[1::2], strict=True):  # accumulated, and not prefetched
        step(ours, own, first.to(device), second.to(device))
        step(whole, theirs, first, second)
    same(ours.state_dict(), whole.state_dict(), rtol)
    same(own.state_dict(), theirs.state_dict(), rtol)
    whole.eval(), ours.eval()
    with torch.inference_mode():
        ids = torch.arange(20)
        torch.testing.assert_close(ours(ids.to(device)).cpu(), whole(ids), rtol=rtol, atol=rtol / 100)
    ids = torch.arange(15)
    torch.testing.assert_close(ours(ours.map.prefetch(ids)).cpu(), whole(ids), rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("back", [False, True], ids=["into host memory", "out of it"])
def test_a_run_goes_on_from_the_states_of_either(back: bool) -> None:
    first, second = embedding(not back), embedding(back)
    one, other = optimizer_of(first, "rowwise-adagrad"), optimizer_of(second, "rowwise-adagrad")
    for ids in batches(5):
        step(first, one, ids)
    step(second, other, batches(1, 4)[0])  # and has rows in its cache
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for ids in batches(5, 1):
        step(first, one, ids)
        step(second, other, ids)
    same(first.state_dict(), second.state_dict())
    same(one.state_dict(), other.state_dict())


def test_it_is_saved_as_the_map_that_it_was_made_of(tmp_path: Path) -> None:
    ours = embedding(True)
    own = optimizer_of(ours, "rowwise-adagrad")
    step(ours, own, *batches(1))
    ours.save(tmp_path)
    loaded = DeFINE.load(tmp_path).double()
    assert type(loaded.map) is StandardMap
    assert loaded.map.sparse
    same(loaded.state_dict(), ours.state_dict())
    loaded.map = HostMap(loaded.map, CACHE)
    ids = torch.arange(20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids), ours(ids))
    assert ours.map.resting.table.weight.data_ptr() == ours.state_dict()["map.table.weight"].data_ptr()


def test_a_copy_is_its_own_table_with_the_newest_rows() -> None:
    ours = embedding(True)
    own = optimizer_of(ours, "rowwise-adagrad")
    step(ours, own, *batches(1))
    twin = copy.deepcopy(ours)
    before = copy.deepcopy(ours.state_dict())
    same(twin.state_dict(), before)
    step(ours, own, *batches(1, 2))
    same(twin.state_dict(), before)
    step(twin, optimizer_of(twin, "rowwise-adagrad"), *batches(1))


def test_only_the_cache_moves() -> None:
    ours = embedding(True).to("meta")
    assert ours.map.cache.is_meta
    assert not ours.map.resting.table.weight.is_meta
    half = embedding(True).to(torch.bfloat16)
    with torch.no_grad():
        assert half.map.resting.table.weight.dtype == half(torch.arange(3)).dtype == torch.bfloat16
    assert "60 × 4 in host memory, 24 rows in the cache" in repr(half)


def test_resize_and_reset() -> None:
    whole, ours = embedding(False), embedding(True)
    theirs, own = optimizer_of(whole, "rowwise-adagrad"), optimizer_of(ours, "rowwise-adagrad")
    for model, optimizer in ((whole, theirs), (ours, own)):
        step(model, optimizer, *batches(1))
        torch.manual_seed(5)
        model.resize(V + 3)
        step(model, optimizer_of(model, "rowwise-adagrad"), torch.tensor([V + 1, 0]))
    same(ours.state_dict(), whole.state_dict())
    for model in (whole, ours):
        torch.manual_seed(6)
        model.reset_parameters()
    same(ours.state_dict(), whole.state_dict())


def test_ids_that_were_written_to_are_fetched_again() -> None:
    whole, ours = embedding(False), embedding(True)
    ids = ours.map.prefetch(torch.tensor([1, 2]))
    ids += 3
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), whole(ids))


def test_bags_of_it() -> None:
    whole, ours = DeFINEBag(embedding(False)), DeFINEBag(embedding(True))
    with torch.no_grad():
        for offsets in (torch.tensor([0, 4]), torch.tensor([0, 1])):
            ids = torch.tensor([1, 2, 2, 7, 50])
            torch.testing.assert_close(ours(ids, offsets), whole(ids, offsets))


def test_a_cache_as_large_as_the_table_can_be_read_whole() -> None:
    whole, ours = embedding(False), embedding(True, cache_rows=V)
    torch.testing.assert_close(ours.eval().cached().weight, whole.eval().cached().weight)


REFUSED: dict[str, Callable[[DeFINE], object]] = {
    "learns by an optimiser that it follows": lambda model: model(torch.tensor([3])),
    "30 different rows do not fit a cache of 24": lambda model: model.map.prefetch(torch.arange(30)),
    "The id 60 is outside the vocabulary": lambda model: model.map.prefetch(torch.tensor([60])),
    "The optimiser does not have the parameter cache": lambda model: model.map.follow(
        RowwiseAdagrad(model.unit.parameters())
    ),
    "Adagrad has numbers for the rows of the cache already": lambda model: model.map.follow(
        torch.optim.Adagrad(model.map.parameters())
    ),
    "A HostMap is made of a StandardMap, not of a AdaptiveMap": lambda model: HostMap(AdaptiveMap(V, N, (9,)), 9),
    "SGD keeps sparse numbers": lambda model: step(model, with_momentum(model), torch.tensor([1])),
}


def with_momentum(model: DeFINE) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.map.parameters(), lr=0.1, momentum=0.9)
    model.map.follow(optimizer)
    return optimizer


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_would_not_be_the_same_is_refused(sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        REFUSED[sentence](embedding(True))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="learns in one process only"):
        optimizer_of(embedding(True), "rowwise-adagrad")


def test_other_weights_are_refused_as_torch_does() -> None:
    ours = embedding(True)
    state = ours.state_dict()
    with pytest.raises(RuntimeError, match=r"map\.table\.weight is \(3, 4\), but the table \(60, 4\)"):
        ours.load_state_dict({**state, "map.table.weight": torch.zeros(3, 4)})
    del state["map.table.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"map\.table\.weight\""):
        ours.load_state_dict(state)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 29), max_size=6), st.booleans()), max_size=30))
def test_slots_are_those_of_their_rows(asked: list[tuple[set[int], bool]]) -> None:
    slots, pinned = RowSlots(30, 13), []
    for rows, keeps in asked:
        wanted = np.array(sorted(rows), np.int64)
        while pinned and (keeps or len(pinned) > 1):
            slots.unpin(pinned.pop(0))
        before = {int(row): slot for slot, row in enumerate(slots.row_of) if row >= 0}
        placed = slots.place(wanted)
        pinned.append(placed.slots)
        assert slots.row_of[placed.slots].tolist() == wanted.tolist()
        assert slots.slot_of[wanted].tolist() == placed.slots.tolist()
        assert {int(r) for r in placed.new_rows} == rows - before.keys()
        assert [before[int(row)] for row in placed.old_rows] == placed.old_slots.tolist()
        held, rows_held = slots.held()
        assert (slots.slot_of[rows_held] == held).all()
        assert (slots.slot_of >= 0).sum() == len(held)
        assert all((slots.pins[kept] > 0).all() for kept in pinned)


def test_rows_in_steady_use_stay() -> None:
    slots, draw, missed = RowSlots(10_000, 400), np.random.default_rng(1), []
    for _ in range(300):
        rows = np.unique(np.concatenate((np.arange(100), draw.integers(100, 10_000, 100))))
        placed = slots.place(rows)
        slots.unpin(placed.slots)
        missed.append(int((placed.new_rows < 100).sum()))
    assert missed[0] == 100
    assert np.mean(missed[10:]) < 5
