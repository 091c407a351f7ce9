import pytest
import torch

from torchdefine.config import Config
from torchdefine.embedding import MLPConfig, UnitConfig
from torchdefine.tables import DenseRows, svd_table
from torchdefine.tables.fitted_unit import UnitRows
from torchdefine.tables.low_rank import principal_directions
from torchdefine.tables.source import as_weights


@pytest.mark.parametrize("rank", [1, 5, 24])
def test_the_plain_table_is_the_truncated_svd(rank: int) -> None:
    x = torch.randn(70, 24)
    mean = x.mean(0)
    u, s, vh = torch.linalg.svd((x - mean).double(), full_matrices=False)
    expected = (u[:, :rank] * s[:rank]) @ vh[:rank] + mean
    ours = svd_table(x, rank)(torch.arange(70))
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


def test_weighting_gives_the_least_weighted_error() -> None:
    x, weights = torch.randn(70, 24), torch.rand(70) ** 4
    directions = principal_directions(x, 6, weights)
    torch.testing.assert_close(directions @ directions.T, torch.eye(6), rtol=1e-5, atol=1e-5)
    _, s, _ = torch.linalg.svd(weights.double().sqrt()[:, None] * x.double())
    left_over = ((x - x @ directions.T @ directions).square().sum(-1) * weights).sum()
    torch.testing.assert_close(left_over.double(), s[6:].square().sum(), rtol=1e-5, atol=1e-5)


def test_weights_grow_more_slowly_than_counts() -> None:
    weights = as_weights([0, 15, 255], torch.zeros(3, 2))
    torch.testing.assert_close(weights, torch.tensor([1.0, 8.0, 64.0]) / 73)  # (count + 1) to the power of 3/4


def test_frequent_rows_are_kept_whole() -> None:
    x, counts = torch.randn(70, 24), torch.randperm(70)
    table = svd_table(x, 4, 9, counts=counts)
    frequent = counts.argsort(descending=True)[:9]
    torch.testing.assert_close(table(frequent), x[frequent], rtol=1e-6, atol=1e-6)
    assert (table(torch.arange(70)) - x).abs().max() > 0.1


@pytest.mark.parametrize(
    "config", [UnitConfig(embedding_dim=24, expand_dim=32, depth=3), MLPConfig(embedding_dim=24, expand_dim=20)]
)
def test_unit_rows_are_the_unit_of_the_factor(config: Config) -> None:
    factor = torch.randn(30, 8)
    rows = UnitRows(DenseRows.of(factor), config)
    torch.testing.assert_close(rows.matrix(), rows.unit(factor))
