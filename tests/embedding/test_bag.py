from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from torchdefine import DeFINE, DeFINEBag, StandardMap
from torchdefine.errors import UserError

V, M = 50, 12
FLAT = torch.tensor([4, 7, 7, 0, 3, 3, 49, 7, 0])
CALLS: dict[str, dict[str, Any]] = {
    "offsets": {"ids": FLAT, "offsets": torch.tensor([0, 3, 3, 4, 8])},
    "offsets with the last": {"ids": FLAT, "offsets": torch.tensor([0, 3, 3, 4, 9]), "include_last_offset": True},
    "rows": {"ids": FLAT.view(3, 3)},
    "int32": {"ids": FLAT.int(), "offsets": torch.tensor([0, 5]).int()},
    "nothing": {"ids": FLAT[:0], "offsets": torch.tensor([0, 0])},
}


def embedding(padding_idx: int | None = None, sparse: bool = False) -> DeFINE:
    torch.manual_seed(3)
    return DeFINE.over(StandardMap(V, 4, padding_idx, sparse=sparse), M, expand_dim=16).double()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("padding", [None, 0, 7])
@pytest.mark.parametrize("mode", ["sum", "weighted", "mean", "max"])
def test_equals_an_embedding_bag_over_all_vectors_with_its_gradients(mode: str, padding: int | None, call: str) -> None:
    given = dict(CALLS[call])
    ids, offsets, last = given["ids"], given.get("offsets"), given.get("include_last_offset", False)
    weights = torch.randn(ids.shape, dtype=torch.float64, requires_grad=True) if mode == "weighted" else None
    name: Any = "sum" if mode == "weighted" else mode
    ours = DeFINEBag(embedding(padding), name, last)
    all_vectors = ours.embedding(torch.arange(V))
    theirs = nn.functional.embedding_bag(
        ids, all_vectors, offsets, mode=name, per_sample_weights=weights, include_last_offset=last, padding_idx=padding
    )
    found = ours(ids, offsets, per_sample_weights=weights)
    torch.testing.assert_close(found, theirs)
    torch.testing.assert_close(ours.cached()(ids, offsets, per_sample_weights=weights), theirs.detach())
    sources = [*ours.parameters(), *([] if weights is None else [weights])]
    cotangent = torch.randn_like(theirs)
    for own, reference in zip(
        torch.autograd.grad(found, sources, cotangent), torch.autograd.grad(theirs, sources, cotangent), strict=True
    ):
        torch.testing.assert_close(own, reference)


def test_the_unit_sees_equal_ids_once_and_nothing_when_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    bag, seen = DeFINEBag(embedding(), "sum").eval(), []
    bag.embedding.unit.register_forward_hook(lambda module, given, vectors: seen.append(len(vectors)))
    expected = bag(**{key: CALLS["offsets"][key] for key in ("ids", "offsets")})
    assert seen == [5]
    bag.cache()
    seen.clear()
    torch.testing.assert_close(bag(CALLS["offsets"]["ids"], CALLS["offsets"]["offsets"]), expected)
    assert not seen
    with torch.no_grad():
        bag.embedding.map.table.weight.mul_(2)
    assert not torch.allclose(bag(CALLS["offsets"]["ids"], CALLS["offsets"]["offsets"]), expected)


def test_sparse_gradients_are_those_of_the_bags_own_rows() -> None:
    dense, sparse = DeFINEBag(embedding(0)), DeFINEBag(embedding(0, sparse=True))
    for bag in (dense, sparse):
        bag(FLAT, torch.tensor([0, 4])).square().sum().backward()
    gradient = sparse.embedding.map.table.weight.grad
    assert gradient.is_sparse
    assert sorted(gradient.coalesce().indices()[0].tolist()) == [3, 4, 7, 49]
    torch.testing.assert_close(gradient.to_dense(), dense.embedding.map.table.weight.grad)


def test_save_load_and_resize(tmp_path: Path) -> None:
    bag = DeFINEBag(embedding(2, sparse=True), "sum", include_last_offset=True)
    bag.save(tmp_path)
    loaded = DeFINEBag.load(tmp_path)
    assert (loaded.mode, loaded.include_last_offset, loaded.padding_idx) == ("sum", True, 2)
    assert loaded.embedding.map.sparse
    assert torch.equal(parameters_to_vector(loaded.parameters()), parameters_to_vector(bag.parameters()))
    given = FLAT, torch.tensor([0, 3, 9])
    before = loaded(*given)
    assert torch.equal(before, bag(*given))
    assert torch.equal(loaded.resize(V + 5)(*given), before)
    assert loaded.embedding.map.sparse
    (tmp_path / "bag.json").write_text((tmp_path / "bag.json").read_text().replace("sum", "max"))
    with pytest.raises(UserError, match=r"bag\.json is damaged, or was changed"):
        DeFINEBag.load(tmp_path)


def test_bad_bags_are_refused() -> None:
    bag, weights = DeFINEBag(embedding(), "mean"), torch.ones(9)
    refused = {
        "Ids of one dimension need offsets": lambda: bag(FLAT),
        "Ids of two dimensions have a bag in each row": lambda: bag(FLAT.view(3, 3), torch.tensor([0])),
        "The ids have 3 dimensions": lambda: bag(FLAT.view(3, 3, 1)),
        "per_sample_weights go with the mode sum, not with mean": lambda: bag(FLAT.view(3, 3), None, weights),
        "per_sample_weights have the shape": lambda: DeFINEBag(embedding(), "sum")(FLAT.view(3, 3), None, weights),
        "mode is 'median'": lambda: DeFINEBag(embedding(), "median"),  # type: ignore[arg-type]
        "The id 50 is outside the vocabulary": lambda: bag(torch.tensor([[50]])),
        "A bag over a Embedding has no files": lambda: DeFINEBag(nn.Embedding(3, 2)).save("nowhere"),
    }
    for sentence, call in refused.items():
        with pytest.raises(UserError, match=sentence):
            call()
