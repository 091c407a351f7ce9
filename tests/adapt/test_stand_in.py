"""What stands in for a table: cached as a plain nn.Embedding, cached in place, saved and loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchdefine import replace_embeddings
from torchdefine.adapt import cache_tables
from torchdefine.adapt.stand_in import StandIn
from torchdefine.embedding import UnitConfig
from torchdefine.errors import UserError
from torchdefine.tables import load_table, quantised_table

pytestmark = pytest.mark.filterwarnings("ignore:The replacement of")  # the tables are tiny

ROWS, WIDTH = 40, 12
SIZES: dict[str, Any] = {"map_dim": 8, "expand_dim": 16, "depth": 2}


class Scaled(nn.Embedding):
    def __init__(self, factor: float, padding_idx: int | None = None) -> None:
        super().__init__(ROWS, WIDTH, padding_idx)
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.factor


def shared_model(padding_idx: int | None = None) -> nn.ModuleDict:
    """One matrix that is looked up with two scales, and a head that is tied to it."""
    model = nn.ModuleDict(
        {"source": Scaled(3.0, padding_idx), "target": Scaled(0.5, padding_idx), "head": nn.Linear(WIDTH, ROWS)}
    )
    model["target"].weight = model["head"].weight = model["source"].weight
    return model


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", ["source", "target"])
def test_cached_is_an_embedding_with_the_same_answers(name: str, given: bool, padding_idx: int | None) -> None:
    model = shared_model(padding_idx).double()
    table = quantised_table(model["source"].weight.detach(), 4, 12, padding_idx=padding_idx) if given else None
    replace_embeddings(model, targets="source", table=table, **SIZES)
    ids = torch.randint(ROWS, (3, 5))
    cached = model[name].cached()
    assert type(cached) is nn.Embedding
    assert (cached.num_embeddings, cached.embedding_dim, cached.padding_idx) == (ROWS, WIDTH, padding_idx)
    assert not cached.weight.requires_grad
    assert cached(ids).dtype == torch.float64
    torch.testing.assert_close(cached(ids), model[name](ids))
    assert model.training  # and nothing else has changed: vectors are still computed
    assert model["source"].looked_up is None
    assert model[name].cached(dtype=torch.float16).weight.dtype == torch.float16


def test_cached_leaves_dropout_out_and_each_part_in_its_mode() -> None:
    model = shared_model()
    replace_embeddings(model, targets="source", unit=UnitConfig(dropout=0.5), **SIZES)
    modes = [part.training for part in model.modules()]
    cached = model["source"].cached()
    assert [part.training for part in model.modules()] == modes
    torch.testing.assert_close(cached.weight, model.eval()["source"](torch.arange(ROWS)))


def test_cache_tables_names_what_it_cached_and_keeps_it_out_of_files() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(ROWS, WIDTH), "tags": nn.Embedding(9, WIDTH)})
    with pytest.raises(UserError, match="no replaced table"):
        cache_tables(model)
    replace_embeddings(model, targets=nn.Embedding, **SIZES)
    before = set(model.state_dict())
    assert cache_tables(model) == ["words", "tags"]
    assert set(model.state_dict()) == before
    assert model["words"].looked_up is not None
    model.train()
    assert model["words"].looked_up is None


def test_vectors_are_not_cached_while_they_learn() -> None:
    model = shared_model().train()
    replace_embeddings(model, targets="source", **SIZES)
    with pytest.raises(UserError, match=r"call eval\(\) first"):
        model["source"].cache()
    assert model["source"](torch.tensor([1])).requires_grad


@pytest.mark.parametrize("given", [False, True])
def test_a_resize_ends_the_cache(given: bool) -> None:
    model = shared_model().eval()
    table = quantised_table(model["source"].weight.detach(), 4, 12) if given else None
    replace_embeddings(model, targets="source", table=table, **SIZES)
    model["source"].cache().resize(ROWS + 3, from_mean=True)
    assert model["source"](torch.tensor([ROWS + 2])).any()


def test_the_padding_of_the_replaced_table_is_told_though_its_row_is_not_zero() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(ROWS, WIDTH, padding_idx=2)})
    nn.init.ones_(model["tokens"].weight)
    replace_embeddings(model, table=quantised_table(model["tokens"].weight.detach(), 8, 12))
    assert model["tokens"].padding_idx == 2
    assert model["tokens"](torch.tensor([2])).all()


def test_rows_that_a_compact_table_gets_start_at_the_mean_of_its_own() -> None:
    matrix = torch.randn(ROWS, WIDTH) + 10
    stand_in = StandIn(quantised_table(matrix, 8, 12), nn.Embedding(ROWS, WIDTH))
    stand_in.resize(ROWS + 2, from_mean=True)
    vectors = stand_in(torch.arange(ROWS + 2))
    torch.testing.assert_close(vectors[ROWS:], vectors[:ROWS].mean(0).expand(2, -1))


def test_a_fresh_model_takes_the_weights_after_the_same_replacement(tmp_path: Path) -> None:
    model = shared_model().eval()
    replace_embeddings(model, targets="source", **SIZES)
    cache_tables(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    fresh = shared_model()
    with pytest.raises(RuntimeError, match=r"size mismatch for source\.weight"):
        fresh.load_state_dict(state)
    replace_embeddings(fresh, targets="source", **SIZES)
    cache_tables(fresh)
    fresh.load_state_dict(state)  # which also drops the cache of the old weights
    fresh.eval()
    ids = torch.randint(ROWS, (3, 5))
    for name in ("source", "target"):
        torch.testing.assert_close(fresh[name](ids), model[name](ids))
    assert torch.equal(fresh["head"](torch.ones(1, WIDTH)), model["head"](torch.ones(1, WIDTH)))


def test_a_given_table_is_given_again_before_the_weights_come(tmp_path: Path) -> None:
    model = shared_model().eval()
    table = quantised_table(model["source"].weight.detach(), 4, 12)
    table.save(tmp_path / "table.safetensors")
    replace_embeddings(model, targets="source", table=table)
    fresh = shared_model().eval()
    replace_embeddings(fresh, targets="source", table=load_table(tmp_path / "table.safetensors"))
    fresh.load_state_dict(model.state_dict())
    ids = torch.randint(ROWS, (3, 5))
    assert torch.equal(fresh["target"](ids), model["target"](ids))
    assert torch.equal(fresh["head"](torch.ones(1, WIDTH)), model["head"](torch.ones(1, WIDTH)))
