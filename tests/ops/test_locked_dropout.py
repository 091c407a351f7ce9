import pytest
import torch

from torchdefine.ops import locked_dropout


def test_one_mask_for_all_positions_and_the_mean_is_kept() -> None:
    x = torch.ones(300, 9, 40)
    dropped = locked_dropout(x, 0.25, time_dim=1)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert not torch.equal(dropped[0], dropped[1])
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs(float(dropped.mean()) - 1) < 0.03
    assert locked_dropout(x, 0.0, time_dim=1) is x
