import copy
from typing import Any

import pytest
import torch
from benchmarks.measuring import Setting
from torch import nn

from benchmarks import large_tables
from torchdefine import DeFINE, HostMap

CPU = torch.device("cpu")
ROWS = 10_000


def test_every_batch_has_as_many_different_ids() -> None:
    for rows in (ROWS, 10_000_000):
        ids = large_tables.some_ids(rows, CPU)
        assert (len(ids), len(ids.unique())) == (large_tables.IDS, large_tables.DIFFERENT)
        assert 0 <= int(ids.min()) <= int(ids.max()) < rows


def test_all_contestants_train_a_table_of_sparse_gradients() -> None:
    for line, make in large_tables.LINES.items():
        model = make(ROWS, large_tables.ON_CPU)
        before = model.map.table.weight.detach().clone()
        large_tables.stepping(model, nn.Linear(64, 1), ROWS, CPU)()
        assert model.map.table.weight.grad.is_sparse, line
        changed = (model.map.table.weight != before).any(1)
        assert int(changed.sum()) == large_tables.DIFFERENT, line


def test_a_step_with_the_table_in_host_memory_is_the_same_step() -> None:
    torch.manual_seed(1)
    whole: Any = large_tables.LINES["DeFINE"](ROWS, large_tables.ON_CPU)
    theirs = nn.Linear(64, 1)
    ours = DeFINE.over(HostMap(copy.deepcopy(whole.map), large_tables.CACHE_ROWS), 64, expand_dim=64)
    ours.unit.load_state_dict(whole.unit.state_dict())
    own = copy.deepcopy(theirs)
    for make, model, head in (
        (large_tables.stepping, whole, theirs),
        (large_tables.stepping_from_host_memory, ours, own),
    ):
        torch.manual_seed(2)
        step = make(model, head, ROWS, CPU)
        for _ in range(large_tables.BATCHES + 2):
            step()
    for (name, one), (_, other) in zip(whole.state_dict().items(), ours.state_dict().items(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=name)


def test_memory_is_held_against_the_bytes_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(CPU, small=True)
    whats = [contestant.name for contestant in large_tables.memory_group(setting).contestants]
    assert whats == ["build", "step", "save", "load", "resize", "cached"]
    monkeypatch.setattr(large_tables, "IDS", 64)
    monkeypatch.setattr(large_tables, "DIFFERENT", 32)
    for what in whats:
        prepared = large_tables.memory_work(what, ROWS, setting)
        prepared.work()
