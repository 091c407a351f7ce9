import math

import pytest
import torch
from torch import Tensor

from torchdefine import AdaptiveMap, DeFINE, StandardMap
from torchdefine.analysis.correlation import CorrelationMap, cosines_of, embedding_maps
from torchdefine.embedding import TokenEmbedding, table
from torchdefine.errors import UserError


def correlation_map(vectors: Tensor) -> CorrelationMap:
    exact = vectors.double()
    return CorrelationMap("table", cosines_of(exact.T @ exact))


def test_independent_columns_give_the_identity() -> None:
    orthogonal = torch.linalg.qr(torch.randn(50, 8, dtype=torch.float64)).Q * torch.arange(1, 9)
    found = correlation_map(orthogonal)
    torch.testing.assert_close(found.values, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-12)
    assert found.mean_off_diagonal == pytest.approx(0, abs=1e-12)
    assert found.effective_rank == pytest.approx(8)
    assert found.fraction_above(0.1) == 0


def test_duplicated_columns_give_ones() -> None:
    column = torch.randn(40, 1, dtype=torch.float64)
    found = correlation_map(torch.cat((column, -3 * column, 0.5 * column), 1))
    torch.testing.assert_close(found.values, torch.ones(3, 3, dtype=torch.float64))
    assert found.effective_rank == pytest.approx(1)
    assert found.fraction_above(0.5) == 1
    assert found.mean_off_diagonal == pytest.approx(1)


def test_equals_a_brute_force_loop() -> None:
    vectors = torch.randn(30, 5, dtype=torch.float64)
    found = correlation_map(vectors)
    for i in range(5):
        for j in range(5):
            dot = sum(float(vectors[v, i] * vectors[v, j]) for v in range(30))
            a = math.sqrt(sum(float(vectors[v, i]) ** 2 for v in range(30)))
            b = math.sqrt(sum(float(vectors[v, j]) ** 2 for v in range(30)))
            assert float(found.cosines[i, j]) == pytest.approx(dot / (a * b), abs=1e-12)
    eigenvalues = torch.linalg.eigvalsh(found.cosines)
    shares = [float(e) / 5 for e in eigenvalues]
    assert found.effective_rank == pytest.approx(math.exp(-sum(s * math.log(s) for s in shares)))


def test_a_dead_dimension_is_independent() -> None:
    vectors = torch.randn(30, 3, dtype=torch.float64)
    vectors[:, 1] = 0
    found = correlation_map(vectors)
    assert found.cosines.isfinite().all()
    assert found.cosines[1].tolist() == [0, 1, 0]


def test_maps_of_every_stage_in_one_streamed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = DeFINE.over(AdaptiveMap(50, 16, (10, 30), division=2), 24, expand_dim=64, depth=3)
    calls: list[tuple[int, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr(table, "TOKENS_AT_ONCE", 7)
        maps = embedding_maps(embedding, progress=lambda done, total: calls.append((done, total)))
    assert list(maps) == ["map", "layer 1", "layer 2", "finished"]
    assert calls == [*((done, 50) for done in range(7, 50, 7)), (50, 50)]
    assert embedding.training
    whole = embedding.table()
    torch.testing.assert_close(maps["finished"].cosines, correlation_map(whole).cosines, rtol=1e-5, atol=1e-6)
    first = embedding.eval().unit.layer_outputs(embedding.map(torch.arange(50)))[0]
    torch.testing.assert_close(maps["layer 1"].cosines, correlation_map(first).cosines, rtol=1e-5, atol=1e-6)
    assert [maps[f"layer {i}"].groups for i in (1, 2)] == [4, 2]


def test_centred_maps_are_pearsons_correlations() -> None:
    embedding = TokenEmbedding(StandardMap(60, 5))
    with torch.no_grad():
        embedding.map.table.weight += torch.arange(5)  # a mean that the plain map takes for correlation
    centred = embedding_maps(embedding, centred=True)["finished"].cosines
    expected = torch.corrcoef(embedding.map.table.weight.detach().double().T)
    torch.testing.assert_close(centred, expected, rtol=1e-6, atol=1e-6)
    plain = embedding_maps(embedding)["finished"]
    assert plain.mean_off_diagonal > 2 * CorrelationMap("centred", centred).mean_off_diagonal


def test_groups_are_blocks_of_the_layers_map() -> None:
    cosines = torch.eye(6, dtype=torch.float64)
    cosines[0, 1] = cosines[1, 0] = 0.5  # within group 1
    cosines[0, 4] = cosines[4, 0] = -0.9  # between groups 1 and 2
    whole = CorrelationMap("layer 1", cosines, groups=2)
    assert torch.equal(whole.group(0).cosines, cosines[:3, :3])
    assert whole.group(1).mean_off_diagonal == 0
    between = whole.between_groups()
    assert float(between[0, 1]) == pytest.approx(0.9 / 9)
    assert float(between[0, 0]) == pytest.approx(2 * 0.5 / 6)
    assert float(between[1, 1]) == pytest.approx(0, abs=1e-12)
    of_two = CorrelationMap("layer 2", cosines, groups=3).between_groups()
    assert of_two.diagonal().tolist() == pytest.approx([0.5, 0, 0])


def picture(first: float, second: float) -> CorrelationMap:
    """Of three dimensions, the first of which has these cosines to the others."""
    cosines = torch.eye(3, dtype=torch.float64)
    cosines[0, 1:] = cosines[1:, 0] = torch.tensor([first, second], dtype=torch.float64)
    return CorrelationMap("three", cosines)


def test_numbers_are_of_the_picture_without_signs() -> None:
    one = picture(0.5, 0)
    assert one.distance(picture(-0.5, 0)) == 0
    assert one.distance(picture(0, 0.5)) == pytest.approx(4 * 0.5 / 9)  # more here does not make up for less there
    assert [one.fraction_above(threshold) for threshold in (0.25, 0.5)] == pytest.approx([2 / 6, 0])
    assert picture(-0.5, 0).fraction_above(0.25) == pytest.approx(2 / 6)


def test_distance_is_zero_to_itself_and_refuses_other_widths() -> None:
    one, other = correlation_map(torch.randn(40, 6)), correlation_map(torch.randn(40, 6))
    assert one.distance(one) == 0
    assert one.distance(other) > 0
    with pytest.raises(UserError, match="only maps of equal width"):
        one.distance(correlation_map(torch.randn(40, 5)))


def test_an_embedding_without_a_unit_has_map_and_result() -> None:
    maps = embedding_maps(TokenEmbedding(StandardMap(60, 4)))
    assert list(maps) == ["map", "finished"]
    assert torch.equal(maps["map"].cosines, maps["finished"].cosines)
    assert maps["finished"].numbers()["dimensions"] == 4
