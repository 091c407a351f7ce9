import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchdefine import AdaptiveMap, DeFINE, ProjectiveMap, StandardMap
from torchdefine.context import LSTM, LSTMConfig
from torchdefine.embedding import DenseMLP, TokenEmbedding
from torchdefine.embedding.token_embedding import count_distinct, distinct_ids, embedded
from torchdefine.modes import evaluating, prepare
from torchdefine.output import AdaptiveSoftmax, FullSoftmax
from torchdefine.tasks.language import LanguageModel


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(0, 10))
def test_places_lead_back_to_the_ids(values: list[int], spare: int) -> None:
    ids = torch.tensor(values)
    count = len(set(values))
    for room in (None, count, count + spare):
        distinct, places = distinct_ids(ids, room)
        assert torch.equal(distinct[places], ids)
        assert distinct[:count].tolist() == sorted(set(values))
        assert len(distinct) == (room or count)
    assert count_distinct(np.array(values), 31) == count


def test_counting_leaves_padding_out() -> None:
    assert count_distinct(np.array([[3, 3, -100], [0, -100, -100]]), 5) == 2


def embeddings() -> dict[str, TokenEmbedding]:
    dropping = DeFINE(50, 24, map_dim=16, expand_dim=64, dropout=0.3)
    return {
        "DeFINE": DeFINE(50, 24, map_dim=16, expand_dim=64),
        "padded DeFINE": DeFINE(50, 24, map_dim=16, expand_dim=64, padding_idx=3),
        "projection": TokenEmbedding(StandardMap(50, 16), nn.Linear(16, 24), 24),
        "MLP": TokenEmbedding(StandardMap(50, 16), DenseMLP(16, 32, 24), 24),
        "with dropout": dropping.eval(),
    }


def counted_calls(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call is for, from now on; a hook would keep tokens from being shared."""
    calls: list[int] = []
    forward = kind.forward

    def counting(module: nn.Module, given: torch.Tensor, *more: object) -> torch.Tensor:
        calls.append(given.shape[:1].numel() if given.is_floating_point() else given.numel())
        return forward(module, given, *more)

    monkeypatch.setattr(kind, "forward", counting)
    return calls


@pytest.mark.parametrize("name", embeddings())
@pytest.mark.parametrize("room", [None, 50])
def test_vectors_and_gradients_are_those_of_every_token_by_itself(
    name: str, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = embeddings()[name].double()
    ids = torch.randint(50, (4, 40))
    calls = counted_calls(type(embedding.unit), monkeypatch)
    weights = torch.randn(4, 40, 24, dtype=torch.float64)
    embedding.prepare()
    shared = embedded(embedding, ids, room)
    shared_gradients = torch.autograd.grad((shared * weights).sum(), list(embedding.parameters()))
    assert calls == [room or len(ids.unique())]
    alone = embedding(ids)
    gradients = torch.autograd.grad((alone * weights).sum(), list(embedding.parameters()))
    torch.testing.assert_close(shared, alone, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(shared_gradients, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("row_dropout", [0.0, 0.5])
def test_adaptive_bands_without_a_unit_are_looked_up_once_a_type(
    padding: int | None, row_dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bands = AdaptiveMap(50, 16, (10, 30), division=2, padding_idx=padding, scale=4.0).double()
    embedding = TokenEmbedding(bands)
    embedding.row_dropout = row_dropout
    looked_up = counted_calls(AdaptiveMap, monkeypatch)
    ids = torch.randint(50, (4, 40))
    weights = torch.randn(4, 40, 16, dtype=torch.float64)
    results = []
    for prepared in (True, False):
        embedding.prepare(prepared)
        torch.manual_seed(7)
        vectors = embedded(embedding, ids)
        results.append((vectors, *torch.autograd.grad((vectors * weights).sum(), list(embedding.parameters()))))
    assert looked_up == [len(ids.unique()), ids.numel()]
    for shared, alone in zip(*results, strict=True):
        torch.testing.assert_close(shared, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prepared", [False, True])
def test_dropped_rows_are_the_same_for_all_of_a_type(prepared: bool) -> None:
    embedding = DeFINE(50, 24, map_dim=16, expand_dim=64)
    embedding.row_dropout = 0.5
    embedding.prepare(prepared)
    ids = torch.randint(50, (4, 40))
    vectors = embedded(embedding, ids)
    for token in ids.unique():
        rows = vectors[ids == token]
        assert torch.equal(rows, rows[:1].expand_as(rows))


def test_what_is_not_alike_for_equal_tokens_is_never_shared() -> None:
    dropping = DeFINE(10, 24, map_dim=16, expand_dim=64, dropout=0.5).train()
    dropping.prepare()
    vectors = embedded(dropping, torch.zeros(4, 40, dtype=torch.long))
    assert not torch.equal(vectors[0, 0], vectors[0, 1])
    normed = TokenEmbedding(StandardMap(50, 16), nn.Sequential(nn.Flatten(0, -2), nn.BatchNorm1d(16)), 16)
    normed.prepare()
    assert not normed.shares
    assert not normed.fused


def test_sharing_follows_the_mode_that_a_model_is_in() -> None:
    embedding = DeFINE(10, 24, map_dim=16, expand_dim=64, dropout=0.5).train()
    embedding.prepare()
    assert not embedding.shares
    with evaluating(embedding):
        assert embedding.shares
    assert not embedding.shares


def add_place(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output + torch.arange(output.shape[:-1].numel(), dtype=output.dtype).view(*output.shape[:-1], 1)


@pytest.mark.parametrize("where", ["map", "map.table", "unit", "unit.expansions.0.linear", "unit.last"])
def test_a_hook_or_a_layer_of_somebody_elses_sees_every_token(where: str) -> None:
    ids = torch.zeros(100, dtype=torch.long)
    hooked = DeFINE(50, 24, map_dim=16, expand_dim=64)
    hooked.prepare()
    assert hooked.shares
    hooked.get_submodule(where).register_forward_hook(add_place)
    hooked.prepare()
    assert len(embedded(hooked, ids).unique(dim=0)) == 100
    assert not hooked.fused

    wrapped = DeFINE(50, 24, map_dim=16, expand_dim=64)
    parent, _, name = where.rpartition(".")
    setattr(wrapped.get_submodule(parent), name, nn.Sequential(wrapped.get_submodule(where), nn.Dropout(0.5)))
    if where != "map":  # which would have to be a map again
        wrapped.prepare()
        assert len(embedded(wrapped, ids).unique(dim=0)) > 90


def test_a_forward_of_ones_own_gets_ids_as_they_are() -> None:
    table = StandardMap(50, 16)
    embedding = TokenEmbedding(table)
    model = LanguageModel(embedding, LSTM(16, LSTMConfig(hidden_dim=16)), FullSoftmax(16, table))
    seen: list[tuple[int, ...]] = []
    whole = embedding.forward
    embedding.forward = lambda ids: (seen.append(tuple(ids.shape)), whole(ids))[1]  # type: ignore[method-assign]
    prepare(model)
    model.hidden(torch.randint(50, (3, 7)), model.initial_state(3))
    assert seen == [(3, 7)]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_model_knows_before_how_many_there_can_be(adaptive: bool) -> None:
    torch.manual_seed(0)
    embedding = DeFINE(60, 24, map_dim=16, expand_dim=64)
    if adaptive:
        embedding = DeFINE.over(AdaptiveMap(60, 16, (20, 40), division=2), 24, expand_dim=64)
        output = AdaptiveSoftmax(16, embedding.map)
    else:
        output = FullSoftmax(16, embedding.map)
    model = LanguageModel(embedding, LSTM(24, LSTMConfig(hidden_dim=20), 16), output).double()
    prepare(model)
    text = torch.randint(30, (3, 51))
    ids, targets = text[:, :-1], text[:, 1:]
    hint = model.host_hint(targets.numpy())
    assert hint.distinct is not None
    assert len(ids.unique()) <= hint.distinct <= len(targets.unique()) + 4
    state = model.initial_state(3)
    state = [(h.double(), c.double()) for h, c in state]
    hinted, _ = model(ids, targets, state, hint=hint)
    plain, _ = model(ids, targets, state)
    prepare(model, on=False)
    assert model.host_hint(targets.numpy()).distinct is None
    torch.testing.assert_close(model(ids, targets, state)[0].objective, plain.objective, rtol=1e-12, atol=0)
    prepare(model)
    torch.testing.assert_close(hinted.objective, plain.objective, rtol=1e-12, atol=0)
    padded = targets.clone()
    padded[:, -7:] = -100
    assert model.host_hint(padded.numpy()).distinct >= len(ids.unique()) - 7


def test_somebody_elses_map_is_asked_for_ids_and_nothing_else() -> None:
    class Own(torch.nn.Module):
        num_embeddings, map_dim, output_dim, padding_idx = 50, 16, 16, None

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * self.table(ids)

    embedding = TokenEmbedding(Own(), nn.Linear(16, 8), 8)
    ids = torch.randint(50, (4, 40))
    expected = embedding.unit(2 * embedding.map.table.weight[ids])
    torch.testing.assert_close(embedding(ids), expected)
    embedding.prepare()
    torch.testing.assert_close(embedded(embedding, ids, 60), expected)


class PlacesMap(StandardMap):
    """Somebody's map made from ours: a vector knows where in the text it stands."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(ids) + torch.arange(ids.shape[-1]).unsqueeze(-1)


class NoisyLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand_like(x[..., :1])


@pytest.mark.parametrize("unit", [None, nn.Linear(16, 8)])
def test_a_map_that_reads_places_is_asked_for_every_token(unit: nn.Module | None) -> None:
    embedding = TokenEmbedding(PlacesMap(50, 16), unit, 16 if unit is None else 8)
    ids = torch.randint(50, (4, 40))
    vectors = embedding.map(ids)
    embedding.prepare()
    torch.testing.assert_close(embedded(embedding, ids), vectors if unit is None else unit(vectors))
    assert not embedding.fused


def test_a_unit_made_from_ours_is_not_taken_for_it() -> None:
    embedding = TokenEmbedding(StandardMap(50, 16), NoisyLinear(16, 8), 8)
    embedding.prepare()
    vectors = embedded(embedding, torch.zeros(100, dtype=torch.long))
    assert len(vectors.unique(dim=0)) == 100


def test_a_map_without_anything_that_learns() -> None:
    class Fixed(nn.Module):
        num_embeddings, map_dim, output_dim, padding_idx = 50, 16, 16, None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(50, 16, dtype=torch.float64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table[ids]

    embedding = TokenEmbedding(Fixed()).train()
    embedding.eval().look_up(embedding.map.table.float())
    assert embedding(torch.tensor([3])).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["standard", "projective", "adaptive"])
def test_on_a_gpu_gradients_are_those_of_tokens_one_by_one(kind: str) -> None:
    torch.manual_seed(0)
    made = {
        "standard": lambda: DeFINE(50, 24, map_dim=16, expand_dim=64, padding_idx=3),
        "projective": lambda: DeFINE.over(ProjectiveMap(50, 8, 16, padding_idx=3), 24, expand_dim=64),
        "adaptive": lambda: DeFINE.over(AdaptiveMap(50, 16, (10, 20), division=2, padding_idx=3), 24, expand_dim=64),
    }
    embedding = made[kind]().cuda().double()
    ids = torch.randint(50, (4, 40), device="cuda")
    upstream = torch.randn(4, 40, 24, device="cuda", dtype=torch.float64)
    apart = torch.autograd.grad(embedding(ids), [*embedding.parameters()], upstream)
    embedding.prepare()
    shared = torch.autograd.grad(embedded(embedding, ids, 60), [*embedding.parameters()], upstream)
    again = torch.autograd.grad(embedded(embedding, ids, 60), [*embedding.parameters()], upstream)
    for one, same, other in zip(shared, again, apart, strict=True):
        assert torch.equal(one, same)
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
def test_on_a_gpu_too_and_without_waiting() -> None:
    embedding = DeFINE(50, 24, map_dim=16, expand_dim=64).cuda()
    ids = torch.randint(50, (4, 40), device="cuda")
    embedding.prepare()
    embedded(embedding, ids, 50)
    torch.cuda.set_sync_debug_mode("error")
    try:
        shared = embedded(embedding, ids, 50)
        shared.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(shared, embedding(ids), rtol=1e-4, atol=1e-5)
