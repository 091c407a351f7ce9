"""A replacement that is larger than the table says so, once, with the numbers and the way out; others are silent."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapt.model_identity import model_hash
from torchdefine import DeFINE, replace_embeddings
from torchdefine.tables import dense_table, quantised_table


class Tagger(nn.Module):
    def __init__(self, rows: int, width: int, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, width)
        self.out = nn.Linear(width, rows)
        if tied:
            self.out.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.emb(ids))


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_unit_follows_the_width_of_each_table() -> None:
    model = nn.ModuleDict({"narrow": nn.Embedding(9_000, 64), "wide": nn.Embedding(9_000, 512)})
    replace_embeddings(model, map_dim=16, targets=nn.Embedding)
    assert [model[name].table.plan.config.expand_dim for name in ("narrow", "wide")] == [256, 1024]
    model = nn.ModuleDict({"narrow": nn.Embedding(9_000, 64)})
    replace_embeddings(model, map_dim=16, expand_dim=96)
    assert model["narrow"].table.plan.config.expand_dim == 96


@pytest.mark.parametrize("unit", ["define-no-reduce", "define-residual", "glt"])
def test_every_variant_has_a_width_of_its_own(unit: str) -> None:
    model = Tagger(3_000, 64)
    replace_embeddings(model, map_dim=32, unit=unit)
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 3_000)


def test_a_small_table_that_grows_is_told_of() -> None:
    model = Tagger(1_010, 128)
    with pytest.warns(UserWarning, match="larger than the table") as told:
        replace_embeddings(model, map_dim=64)
    assert len(told) == 1
    assert str(told[0].message) == (
        f"The replacement of emb is larger than the table, {parameters(model.emb):,} parameters in place of 129,280: "
        "use a smaller map_dim (now 64) or expand_dim (now 512), or keep the table."
    )
    assert told[0].filename == __file__  # where the user's own line is


def test_where_warnings_are_errors_nothing_is_changed() -> None:
    model = Tagger(1_010, 128)
    before = model_hash(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="larger than the table"):
            replace_embeddings(model, map_dim=64)
    assert model_hash(model) == before


def test_the_projection_of_a_tied_head_counts() -> None:
    width, map_dim = 64, 32
    unit = parameters(DeFINE(1, width, map_dim, 64).unit)
    rows = -(-unit // (width - map_dim)) + 1  # V (m - n) is just more than the unit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace_embeddings(Tagger(rows, width), map_dim=map_dim, expand_dim=64)
    model = Tagger(rows, width, tied=True)
    with pytest.warns(UserWarning, match="larger than the table") as told:
        replace_embeddings(model, map_dim=map_dim, expand_dim=64)
    after = parameters(model.emb) + parameters(model.out) - rows  # less the bias, which was there before
    assert f"{after:,} parameters in place of {rows * width:,}" in str(told[0].message)


def test_an_output_layer_that_keeps_the_old_matrix_is_named() -> None:
    model = Tagger(3_000, 64, tied=True)
    with pytest.warns(UserWarning, match=r"with the old matrix that out keeps: use heads='tie', a smaller map_dim"):
        replace_embeddings(model, map_dim=16, heads="untie")


def test_given_tables_are_told_of_when_they_need_more_bytes() -> None:
    model = Tagger(300, 64)
    with pytest.warns(UserWarning, match=r"in place of 19,200: give a smaller table, or keep the old one\."):
        replace_embeddings(model, table=dense_table(model.emb.weight.detach(), "float32"))


@pytest.mark.parametrize("fewer_bytes", [lambda w: quantised_table(w, 4, 32), lambda w: dense_table(w, "float16")])
def test_as_many_numbers_in_fewer_bytes_are_no_growth(fewer_bytes: Any) -> None:
    model = Tagger(300, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = replace_embeddings(model, table=fewer_bytes(model.emb.weight.detach()))
    assert report.tables[0].parameters_after >= report.tables[0].parameters_before


def test_with_define_says_it_where_it_is_called() -> None:
    pytest.importorskip("transformers")
    from tests.adapt.tiny_models import llama
    from torchdefine.adapt.huggingface import with_define

    model = llama(True)
    with pytest.warns(UserWarning, match="larger than the table") as told:
        with_define(model, map_dim=16)
    assert told[0].filename == __file__
    assert model.get_input_embeddings().table.plan.config.expand_dim == 4 * model.config.hidden_size
