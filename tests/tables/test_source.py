import torch

from torchdefine.tables.source import RowDraws


def test_rows_are_drawn_by_weight_and_count_for_the_rest_of_it() -> None:
    weights = torch.tensor([0.0, 1.0, 16.0, 81.0])
    draws = RowDraws(weights, torch.Generator().manual_seed(0))
    drawn = draws.draw(100_000)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(shares, torch.tensor([0.0, 1.0, 8.0, 27.0]) / 36, rtol=0.05, atol=0)
    errors = torch.tensor([5.0, 7.0, 2.0, 3.0])
    mean = (errors * draws.left)[drawn].mean()
    torch.testing.assert_close(mean, weights @ errors, rtol=0.01, atol=0)
