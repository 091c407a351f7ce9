"""Slim embeddings: rows made of shared sub-vectors."""

from pathlib import Path

import pytest
import torch

from torchdefine import DeFINE, SlimMap, load_run, train
from torchdefine.embedding import SlimConfig, VocabularyFacts
from torchdefine.errors import UserError
from torchdefine.output import FullSoftmax


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [None, 7])
def test_rows_and_gradients_are_those_of_a_loop(padding: int | None, sparse: bool) -> None:
    layer = SlimMap(50, 12, parts=4, pool=9, padding_idx=padding, scale=1.5, sparse=sparse).double()
    ids = torch.randint(0, 50, (6, 11))
    ids[0, 0] = 7
    read, pool = layer(ids), layer.table.weight.detach().clone().requires_grad_(True)
    theirs = [
        torch.zeros(12, dtype=torch.float64) if i == padding else torch.cat([pool[p] for p in layer.places[i].tolist()])
        for i in ids.flatten().tolist()
    ]
    reference = 1.5 * torch.stack(theirs).view(6, 11, 12)
    torch.testing.assert_close(read, reference, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(reference)
    (expected,) = torch.autograd.grad(reference, pool, cotangent)
    read.backward(cotangent)
    found = layer.table.weight.grad
    assert found.is_sparse == sparse
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-10, atol=1e-10)


def test_every_sub_vector_is_used_equally_often_in_an_order_that_is_shuffled() -> None:
    layer = SlimMap(1000, 12, parts=4, pool=30)
    assert set(layer.places.unique(return_counts=True)[1].tolist()) == {133, 134}
    assert len({tuple(row) for row in layer.places.tolist()}) > 990
    assert not torch.equal(SlimMap(1000, 12, parts=4, pool=30).places, layer.places)


@pytest.mark.parametrize(("parts", "ratio"), [(10, 8), (10, 100), (5, 2), (1, 1)])
def test_a_ratio_is_kept(parts: int, ratio: float) -> None:
    with torch.device("meta"):
        layer = SlimConfig(map_dim=650, parts=parts, ratio=ratio).build(VocabularyFacts(10_000), None)
    own = sum(p.numel() for p in layer.parameters())
    assert 10_000 * 650 / own == pytest.approx(ratio, rel=1e-3)
    assert layer.pool == round(10_000 * parts / ratio)


def test_rows_come_and_go_while_the_others_stay() -> None:
    layer = SlimMap(50, 12, parts=4, pool=9, padding_idx=3)
    before = layer(torch.arange(50))
    layer.resize(2000)
    assert torch.equal(layer(torch.arange(50)), before)
    assert 0.6 < layer(torch.arange(50, 2000)).std() < 1.4
    layer.resize(20)
    assert torch.equal(layer(torch.arange(20)), before[:20])
    assert FullSoftmax(12, layer, bias=False).weight.equal(before[:20])


def test_it_saves_and_loads_behind_a_unit(tmp_path: Path) -> None:
    embedding = DeFINE.over(SlimMap(50, 16, parts=4, pool=20), 24, expand_dim=32, depth=2).eval()
    embedding.save(tmp_path)
    loaded = DeFINE.load(tmp_path).eval()
    assert torch.equal(loaded(torch.arange(50)), embedding(torch.arange(50)))


def test_a_run_learns_with_it_and_goes_on_after_a_stop(recipe_file: Path, tmp_path: Path) -> None:
    parts = {
        "embedding": {"kind": "slim", "map_dim": 16, "parts": 4, "ratio": 3},
        "unit": {"kind": "none"},
        "output": {"kind": "full"},
        "context": {"layers": 1, "output_dim": 16},
    }
    run = train(recipe_file, out=tmp_path / "run", train={"steps": 80}, optim={"lr": 0.02}, **parts)
    assert run.result["test_perplexity"] < run.result["test_unigram_perplexity"]
    assert run.embedding.map.pool * 3 == pytest.approx(run.embedding.num_embeddings * 4, abs=2)
    assert torch.equal(load_run(tmp_path / "run").embedding.table(), run.embedding.table())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be cut into 5 parts"):
        SlimMap(50, 12, parts=5, pool=3)
    with pytest.raises(UserError, match="pool is 0"):
        SlimMap(50, 12, parts=4, pool=0)
