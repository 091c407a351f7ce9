import copy

import pytest
import torch

from tests.adapt.small_encoder import Encoder, behaviour, counts
from torchdefine.adapt import Distillation, distill
from torchdefine.errors import MachineError, UserError
from torchdefine.tables import quantised_table, svd_table, transform_table

TABLES = {
    "svd": lambda table: svd_table(table, 8, counts=counts()),
    "svd int4": lambda table: svd_table(table, 8, counts=counts(), storage="int4"),
    "bits by importance": lambda table: transform_table(table, 3_000, counts=counts()),
    "int2": lambda table: quantised_table(table, 2, 8),
}


@pytest.mark.parametrize("kind", TABLES)
def test_brings_the_model_nearer_to_what_it_was(kind: str) -> None:
    model = Encoder()
    table = TABLES[kind](model.tokens)
    taught, held_out = behaviour(model, 20, seed=1), behaviour(model, 8, seed=2)
    before, size, types = held_out.similarity(table), table.stored_bytes, _types(table)
    weights = copy.deepcopy(model.state_dict())
    calls: list[tuple[int, int]] = []
    curve = distill(taught, table, Distillation(steps=60, lr=5e-3), lambda done, total: calls.append((done, total)))
    assert held_out.similarity(table) > before + 0.02 * (1 - before)
    assert len(curve) == 60
    assert sum(curve[-10:]) > sum(curve[:10])
    assert calls[-1] == (60, 60)
    assert table.stored_bytes == size
    assert _types(table) == types
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in table.parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_codes_do_not_change_and_the_seed_decides() -> None:
    model = Encoder()
    tables = [quantised_table(model.tokens, 2) for _ in range(3)]
    codes = tables[0].rows.codes.clone()
    for table, seed in zip(tables, (1, 1, 2), strict=True):
        distill(behaviour(model), table, Distillation(steps=5, seed=seed))
    assert torch.equal(tables[0].rows.codes, codes)
    assert torch.equal(tables[0].rows.steps, tables[1].rows.steps)
    assert not torch.equal(tables[0].rows.steps, tables[2].rows.steps)


def test_a_step_moves_every_part_by_the_same_share_of_its_size() -> None:
    model = Encoder()
    table = svd_table(model.tokens, 8, counts=counts())
    before = [part.detach().clone() for part in table.parameters()]
    distill(behaviour(model), table, Distillation(steps=1, lr=1e-3))
    for old, new in zip(before, table.parameters(), strict=True):
        moved = float((new - old).abs().max())  # Adam's first step is the rate wherever there is a gradient
        assert moved == pytest.approx(1e-3 * float(old.square().mean().sqrt()), rel=1e-2)


def test_nothing_to_do_is_refused() -> None:
    model = Encoder()
    with pytest.raises(UserError, match="steps is 0, but must be at least 1"):
        distill(behaviour(model), quantised_table(model.tokens, 2), Distillation(steps=0))


def _types(table: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in table.state_dict().items()}


@pytest.mark.parametrize("kind", TABLES)
def test_what_overflows_is_said_and_leaves_the_parts_as_they_were_stored(kind: str) -> None:
    model = Encoder()
    table = TABLES[kind](model.tokens)
    types, kept = _types(table), copy.deepcopy(table.state_dict())
    with pytest.raises(MachineError, match="overflowed"):
        distill(behaviour(model, 4, seed=1), table, Distillation(steps=20, lr=1e30))
    assert _types(table) == types
    table.load_state_dict(kept)  # as who measures a table before and after does
