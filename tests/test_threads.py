"""What is promised to threads: reads switch nothing that others use; and other weights give other vectors."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from torch import nn
from torch.func import functional_call

from torchdefine import AdaptiveMap, DeFINE, ProjectiveMap, load_run, train
from torchdefine.modes import reading, twins
from torchdefine.run import Run

V, M = 300, 24
IDS = torch.arange(V)


@pytest.fixture(params=["standard", "projective", "adaptive"])
def embedding(request: pytest.FixtureRequest) -> DeFINE:
    torch.manual_seed(1)
    if request.param == "standard":
        return DeFINE(V, M, 12, 32, padding_idx=3, dropout=0.5)
    map_layer = ProjectiveMap(V, 8, 12) if request.param == "projective" else AdaptiveMap(V, 12, (100, 200), division=2)
    return DeFINE.over(map_layer, M, expand_dim=32, dropout=0.5)


@contextmanager
def busily(work: Callable[[], object]) -> Iterator[None]:
    """Eight threads that do the same again and again."""
    done = Event()

    def again() -> None:
        while not done.is_set():
            work()

    threads = [Thread(target=again) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_reading_all_vectors_does_not_switch_the_embedding_that_trains(embedding: DeFINE) -> None:
    wanted = embedding.table()
    with busily(lambda: embedding.cached()):
        for _ in range(100):
            assert embedding.training
            assert all(part.training for part in embedding.modules())
            assert not torch.equal(embedding(IDS), embedding(IDS))  # dropout is at work
    assert all(torch.equal(embedding.table(), wanted) for _ in range(3))


def test_looked_up_vectors_stay_so_while_others_compute_them(embedding: DeFINE) -> None:
    embedding.eval()
    computed, marked = embedding.table(), torch.full((V, M), 7.0)
    embedding.look_up(marked)
    with busily(lambda: embedding.table(computing=True)):
        for _ in range(200):
            assert torch.equal(embedding(IDS), marked)
    assert torch.equal(embedding.table(computing=True), computed)
    assert torch.equal(embedding.table(), marked)


def test_other_weights_give_other_vectors(embedding: DeFINE) -> None:
    embedding.eval()
    with torch.no_grad():
        embedding.look_up(embedding.table())
        other = {name: 2 * tensor for name, tensor in embedding.named_parameters()}
        twin = copy.deepcopy(embedding)
        assert twin.looked_up is not None
        assert torch.equal(twin(IDS), embedding(IDS))
        twin.look_up(None)
        wanted = functional_call(twin, other, (IDS,))
        assert torch.equal(functional_call(embedding, other, (IDS,)), wanted)
        assert torch.equal(embedding(IDS), embedding.looked_up(IDS))
        next(embedding.map.parameters()).mul_(2)
        assert not torch.equal(embedding(IDS), embedding.looked_up(IDS))


def test_vmap_is_a_loop(embedding: DeFINE) -> None:
    embedding.eval()
    ids = torch.arange(40).view(5, 8)
    assert torch.allclose(torch.vmap(embedding)(ids), torch.stack([embedding(row) for row in ids]), atol=1e-6)


def parts_of(value: object, seen: set[int]) -> Iterator[nn.Module]:
    """All modules that can be reached."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        value = value.__dict__
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        for item in value:
            yield from parts_of(item, seen)


@pytest.mark.parametrize(
    "settings",
    [{}, {"context": "transformer-xl"}, {"output": {"kind": "full", "tied": "none"}}, {"output": "mixture"}],
)
def test_a_twin_shares_its_weights_and_nothing_else(recipe_file: Path, tmp_path: Path, settings: dict) -> None:
    run = train(recipe_file, out=tmp_path / "run", train={"steps": 2}, **settings)
    model = run.model
    made = twins(model)
    own, others = set(made), set(made.values())
    assert {*model.modules()} <= own
    assert not own & others
    assert not {*parts_of(made[model], set())} & own
    assert {*map(id, made[model].parameters())} == {*map(id, model.parameters())}


@pytest.fixture(scope="module")
def run(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(recipe_file, out=tmp_path_factory.mktemp("threads") / "run", train={"steps": 20})


def test_a_run_is_used_by_eight_threads(run: Run) -> None:
    opened = load_run(run.folder.path)
    wanted = opened.evaluate("test").perplexity, opened.generate("w1", 10, seed=1), opened.embedding.table()

    def same(number: int) -> bool:
        if number % 3 == 0:
            return opened.evaluate("test").perplexity == wanted[0]
        if number % 3 == 1:
            return opened.generate("w1", 10, seed=1) == wanted[1]
        return torch.equal(opened.embedding.table(), wanted[2])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(same, range(48)))
    assert not any(part.training for part in opened.model.modules())


def test_reading_leaves_no_trace(run: Run) -> None:
    model = run.model
    before = [(part.training, getattr(part, "fused", None)) for part in model.modules()]
    with reading(model) as twin:
        assert twin is not model
        assert [(part.training, getattr(part, "fused", None)) for part in model.modules()] == before
    model.train()
    with reading(model) as twin:
        assert all(part.training for part in model.modules())
        assert not any(part.training for part in twin.modules())
    model.eval()


def test_a_twin_has_its_own_of_whatever_a_module_refers_to() -> None:
    class Referring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.unregistered = [nn.Dropout(0.5)]
            self.by_name = {"also": (nn.Dropout(0.5),)}
            self.bound = self.dropped
            self.sizes = [1, 2]

        def dropped(self, x: torch.Tensor) -> torch.Tensor:
            return self.by_name["also"][0](self.unregistered[0](self.drop(x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bound(x)

    model, x = Referring(), torch.ones(50)
    with reading(model) as twin:
        assert torch.equal(twin(x), x)
        assert not torch.equal(model(x), x)
        assert twin.sizes is model.sizes


def test_a_model_is_evaluated_while_it_is_trained(run: Run, corpus: Path) -> None:
    opened = load_run(run.folder.path)
    wanted = opened.evaluate("test").perplexity
    opened.model.train()
    with busily(lambda: opened.evaluate("test")):
        for _ in range(20):
            assert all(part.training for part in opened.model.modules())
            assert opened.evaluate("test").perplexity == wanted
    opened.model.eval()
