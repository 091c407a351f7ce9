import itertools

import pytest
import torch

from torchdefine.embedding import AdaptiveMap, ProjectiveMap, StandardMap, shrink_cutoffs
from torchdefine.errors import UserError

MAPS = {
    "standard": lambda **kw: StandardMap(50, 16, **kw),
    "projective": lambda **kw: ProjectiveMap(50, 16, 24, **kw),
    "adaptive": lambda **kw: AdaptiveMap(50, 16, (10, 30), division=4, **kw),
    "adaptive-ranked": lambda **kw: AdaptiveMap(50, 16, (10, 30), counts=torch.randint(0, 9, (50,)), **kw),
    "adaptive-projected": lambda **kw: AdaptiveMap(50, 16, (10, 30), output_dim=24, **kw),
}


def naive_adaptive(layer: AdaptiveMap, token: int) -> torch.Tensor:
    rank = token if layer.ranks is None else int(layer.ranks[token])
    edges = [0, *layer.cutoffs, layer.num_embeddings]
    for band, (start, stop) in enumerate(itertools.pairwise(edges)):
        if start <= rank < stop:
            row = layer.bands[band].weight[rank - start]
            return row if band == 0 and not layer.projects_first else row @ layer.projection_of(band)
    raise AssertionError


@pytest.mark.parametrize("kind", ["adaptive", "adaptive-ranked", "adaptive-projected"])
def test_adaptive_equals_a_look_up_band_by_band(kind: str) -> None:
    layer = MAPS[kind]().double()
    ids = torch.arange(50).reshape(5, 10)
    theirs = torch.stack([naive_adaptive(layer, int(i)) for i in ids.flatten()]).reshape(5, 10, -1)
    torch.testing.assert_close(layer(ids), theirs, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(theirs)
    parameters = list(layer.parameters())
    for ours, reference in zip(
        torch.autograd.grad(layer(ids), parameters, cotangent),
        torch.autograd.grad(theirs, parameters, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)


def test_counts_put_the_most_frequent_ids_into_the_widest_band() -> None:
    counts = torch.arange(50)  # id 49 is the most frequent
    layer = AdaptiveMap(50, 16, (10, 30), counts=counts)
    assert layer.ranks is not None
    assert layer.ranks[49] == 0
    assert torch.equal(layer(torch.tensor([49])), layer.bands[0].weight[:1])


@pytest.mark.parametrize("kind", MAPS)
def test_starts_like_nn_embedding(kind: str) -> None:
    layer = MAPS[kind]()
    many = torch.randint(0, 50, (2000,))
    assert 0.5 < layer(many).std() < 1.5
    layer.reset_parameters(std=0.1)
    assert 0.05 < layer(many).std() < 0.15


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("padding", [3, 45, -1])
def test_padding_is_zero_and_learns_nothing(kind: str, padding: int) -> None:
    layer = MAPS[kind](padding_idx=padding)
    ids = torch.tensor([[padding % 50, 1, 20], [40, padding % 50, 49 if padding != -1 else 48]])
    out = layer(ids)
    assert torch.equal(out[0, 0], torch.zeros_like(out[0, 0]))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    cotangent = torch.randn_like(out)
    for _ in range(3):
        optimizer.zero_grad()
        layer(ids).backward(cotangent)
        optimizer.step()
    assert torch.equal(layer(ids)[1, 1], torch.zeros_like(out[0, 0]))
    assert any(not torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_with_counts_the_row_that_starts_at_zero_is_that_of_the_padding_token() -> None:
    layer = AdaptiveMap(50, 16, (10, 30), padding_idx=3, counts=range(50))  # id 3 has the rank 46
    rows = [row for band in layer.bands for row in band.weight]
    assert [rank for rank, row in enumerate(rows) if not row.any()] == [46]


@pytest.mark.parametrize("kind", MAPS)
def test_resize_keeps_old_rows_bit_for_bit(kind: str) -> None:
    layer = MAPS[kind](padding_idx=0)
    ids = torch.arange(50)
    old = layer(ids)
    layer.resize(60)
    assert layer.num_embeddings == 60
    assert torch.equal(layer(ids), old)
    assert layer(torch.arange(50, 60)).std() > 0.3
    with_all = layer(torch.arange(60))
    layer.resize(60)  # as many as there are
    assert torch.equal(layer(torch.arange(60)), with_all)
    if kind != "adaptive-ranked":
        layer.resize(45)
        assert torch.equal(layer(ids[:45]), old[:45])
        with pytest.raises(UserError, match="44"):
            layer(torch.tensor([45]))


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("std", [None, 0.1])
def test_rows_that_come_later_start_like_the_others(kind: str, std: float | None) -> None:
    layer = MAPS[kind]()
    if std is not None:
        layer.reset_parameters(std=std)
    layer.requires_grad_(False).resize(2000)
    assert 0.6 < layer(torch.arange(50, 2000)).std() / (std or 1) < 1.4
    assert not any(parameter.requires_grad for parameter in layer.parameters()), "what is frozen stays so"


def test_resize_refuses_what_it_cannot_keep() -> None:
    for make in MAPS.values():
        with pytest.raises(UserError, match="lose padding row 45"):
            make(padding_idx=45).resize(45)
    with pytest.raises(UserError, match="num_embeddings is 0"):
        StandardMap(50, 8).resize(0)
    with pytest.raises(UserError, match="keep at least 31"):
        MAPS["adaptive"]().resize(30)
    with pytest.raises(UserError, match="Rows cannot be removed"):
        MAPS["adaptive-ranked"]().resize(49)


def test_scale_multiplies_what_leaves_the_map() -> None:
    for kind, make in MAPS.items():
        torch.manual_seed(1)
        plain = make()
        torch.manual_seed(1)
        scaled = make(scale=3.0)
        ids = torch.arange(50)
        torch.testing.assert_close(scaled(ids), 3 * plain(ids), msg=kind)


@pytest.mark.parametrize("kind", MAPS)
def test_bad_ids_are_refused(kind: str) -> None:
    layer = MAPS[kind]()
    with pytest.raises(UserError, match="The id 50 is outside the vocabulary: ids run from 0 to 49"):
        layer(torch.tensor([1, 50]))
    with pytest.raises(UserError, match="The id -1"):
        layer(torch.tensor([-1]))
    with pytest.raises(TypeError, match="whole numbers"):
        layer(torch.tensor([1.0]))
    with pytest.raises(TypeError, match="a tensor of whole numbers, not list"):
        layer([1, 2])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(layer(torch.tensor([0, 1, 49], dtype=dtype)), layer(torch.tensor([0, 1, 49])))
    assert layer(torch.empty(0, 4, dtype=torch.long)).shape[:2] == (0, 4)


def test_bad_tables_are_refused() -> None:
    cases = {
        "cutoff 30 does not fit a vocabulary of 30: use \\(10,\\)": lambda: AdaptiveMap(30, 16, (10, 30)),
        "cutoff 30 does not fit a vocabulary of 20: use \\(10,\\)": lambda: AdaptiveMap(20, 16, (10, 30)),
        "not positive and increasing: try \\(10, 30\\)": lambda: AdaptiveMap(50, 16, (30, 10)),
        "at least one cutoff": lambda: AdaptiveMap(50, 16, ()),
        "is too small for 3 bands": lambda: AdaptiveMap(50, 8, (10, 30)),
        "counts has the shape": lambda: AdaptiveMap(50, 16, (10, 30), counts=[1, 2]),
        "num_embeddings is 0": lambda: StandardMap(0, 16),
        "padding_idx 50 is outside": lambda: StandardMap(50, 16, padding_idx=50),
        "output_dim is 0": lambda: ProjectiveMap(50, 16, 0),
        "output_dim is -1": lambda: AdaptiveMap(50, 16, (10,), output_dim=-1),
        "division is 0": lambda: AdaptiveMap(50, 16, (10,), division=0),
    }
    for message, make in cases.items():
        with pytest.raises(UserError, match=message):
            make()


def test_cutoffs_shrink_on_request() -> None:
    assert shrink_cutoffs((20_000, 40_000, 200_000), 33_278) == (20_000,)
    assert shrink_cutoffs((20_000,), 500) == ()


def test_published_adaptive_size() -> None:
    with torch.device("meta"):
        layer = AdaptiveMap(267_735, 256, (20_000, 40_000, 200_000))
    cluster_weights = 3 * 256
    assert sum(p.numel() for p in layer.parameters()) + cluster_weights == 9_253_212


def test_an_adaptive_map_shows_its_bands_by_id_or_by_rank():
    assert "ids 10 – 29: 4 wide" in repr(AdaptiveMap(50, 16, (10, 30)))
    assert "ranks 10 – 29: 4 wide" in repr(AdaptiveMap(50, 16, (10, 30), counts=range(50)))
    assert "all projected to 24" in repr(MAPS["adaptive-projected"]())
