"""A stand-in has what the map uses of TorchRec; where the real one loads, it is taken."""

import importlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdefine import DeFINE, StandardMap, TorchRecMap
from torchdefine.errors import UserError

V, N = 30, 4


class Collection(nn.Module):
    def __init__(self, tables: list[Any], device: torch.device) -> None:
        super().__init__()
        (self.config,) = tables
        self.embeddings = nn.ModuleDict(
            {self.config.name: nn.Embedding(self.config.num_embeddings, self.config.embedding_dim, device=device)}
        )
        self.config.init_fn(self.embeddings[self.config.name].weight)

    def forward(self, features: Any) -> dict[str, Any]:
        assert features.keys == self.config.feature_names
        assert features.lengths.sum() == len(features.values)
        vectors = self.embeddings[self.config.name](features.values)
        return {self.config.feature_names[0]: SimpleNamespace(values=lambda: vectors)}


@pytest.fixture
def torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.import_module("torchrec")
    except (ImportError, OSError):
        parts = {
            "modules.embedding_configs": {"EmbeddingConfig": SimpleNamespace},
            "modules.embedding_modules": {"EmbeddingCollection": Collection},
            "sparse.jagged_tensor": {"KeyedJaggedTensor": SimpleNamespace},
            "modules": {},
            "sparse": {},
        }
        monkeypatch.setitem(sys.modules, "torchrec", types.ModuleType("torchrec"))
        for name, has in parts.items():
            monkeypatch.setitem(sys.modules, f"torchrec.{name}", module := types.ModuleType(name))
            module.__dict__.update(has)


@pytest.mark.usefixtures("torchrec")
def test_it_is_the_map_of_the_same_table_with_its_gradients() -> None:
    ours = DeFINE.over(TorchRecMap(V, N), 8, expand_dim=16)
    same = DeFINE.over(StandardMap(V, N), 8, expand_dim=16)
    (table,) = ours.map.collection.parameters()
    same.map.table.weight = nn.Parameter(table.detach().clone())
    same.unit = ours.unit
    ids = torch.tensor([[3, 3, 7], [29, 0, 7]])
    gradients: list[Tensor] = []
    for model, weight in ((ours, table), (same, same.map.table.weight)):
        vectors = model(ids)
        gradients.append(torch.autograd.grad(vectors.square().sum(), weight)[0])
    torch.testing.assert_close(ours(ids), same(ids))
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(ours.table(), same.table())


@pytest.mark.usefixtures("torchrec")
def test_its_rows_are_drawn_and_stay_as_many() -> None:
    layer = TorchRecMap(V, N)
    (table,) = layer.collection.parameters()
    assert 0.3 < table.std().item() < 0.7
    layer.reset_parameters(std=2)
    assert 1.4 < table.std().item() < 2.6
    assert all(weight.is_meta for weight in TorchRecMap(V, N, device="meta").parameters())
    with pytest.raises(UserError, match="keeps its number of rows"):
        layer.resize(3)
    with pytest.raises(UserError, match=r"save it by torch\.distributed\.checkpoint"):
        DeFINE.over(layer, 8, expand_dim=16).to_config()


@pytest.mark.parametrize("error", [ImportError("No module named 'torchrec'"), OSError("Could not load\nthis library")])
def test_without_torchrec_one_sentence_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("torchrec"):
            raise error
        return imported(name, *arguments, **options)

    imported = __import__
    monkeypatch.setattr("builtins.__import__", fails)
    reason = r"(No module named 'torchrec'|Could not load)"
    with pytest.raises(UserError, match=rf"TorchRec does not load here \({reason}\): install"):
        TorchRecMap(V, N)
