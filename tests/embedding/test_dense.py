"""The baselines of a unit start as large as the unit does, so that no comparison measures the start."""

import pytest
import torch
from torch import nn

from torchdefine import AdaptiveMap, DeFINE, StandardMap
from torchdefine.embedding import DefineUnit, DenseMLP, DenseProjection, UnitConfig
from torchdefine.errors import UserError

UNITS = {
    "projection": lambda: DenseProjection(256, 192),
    "mlp": lambda: DenseMLP(256, 800, 192),
    "define": lambda: DefineUnit(256, UnitConfig(embedding_dim=192, expand_dim=512)),
    "equalised projection": lambda: DenseProjection(256, 192, weight_scaling=True),
    "equalised mlp": lambda: DenseMLP(256, 800, 192, weight_scaling=True),
    "equalised define": lambda: DefineUnit(256, UnitConfig(embedding_dim=192, expand_dim=512, weight_scaling=True)),
}


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("again", [False, True])
def test_every_unit_starts_with_outputs_of_unit_variance(name: str, again: bool) -> None:
    torch.manual_seed(1)
    unit = UNITS[name]()
    if again:
        for parameter in unit.parameters():
            nn.init.constant_(parameter, 3.0)
        unit.reset_parameters()
    matrices = [parameter for parameter in unit.parameters() if parameter.dim() > 1]
    if name.startswith("equalised"):  # its weights do, too, as far as an activation does not ask for more
        assert all(0.9 < float(matrix.std()) < 2 for matrix in matrices)
    else:
        assert all(float(matrix.std()) < 0.2 for matrix in matrices)
    outputs = unit(torch.randn(4096, 256))
    assert outputs.shape == (4096, 192)
    assert float(outputs.square().mean()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("weight_scaling", [False, True])
def test_an_mlp_is_its_two_layers(weight_scaling: bool) -> None:
    mlp, x = DenseMLP(6, 10, 4, weight_scaling).double(), torch.randn(5, 6, dtype=torch.float64)
    nn.init.normal_(mlp.expand.bias)
    inner, outer = (6**-0.5, 10**-0.5) if weight_scaling else (1.0, 1.0)
    hidden = x @ (inner * mlp.expand.weight.T) + inner * mlp.expand.bias
    expected = (hidden * torch.special.ndtr(hidden)) @ (outer * mlp.reduce.weight.T)
    torch.testing.assert_close(mlp(x), expected)
    assert list(mlp.state_dict()) == ["expand.weight", "expand.bias", "reduce.weight"]


def test_one_projection_is_a_unit_of_depth_one() -> None:
    with pytest.raises(UserError, match="use depth=1"):
        DeFINE(50, 24, map_dim=16, unit="projection")
    unit = DeFINE(50, 24, map_dim=16, depth=1, unit=UnitConfig.of(weight_scaling=True)).unit
    projection = DenseProjection(16, 24, weight_scaling=True)
    weight = unit.last.weight.detach().squeeze(0)
    with torch.no_grad():
        projection.weight.copy_(weight if weight.shape == (24, 16) else weight.T)
    x = torch.randn(5, 16)
    torch.testing.assert_close(unit(x), projection(x))


def test_what_is_printed_tells_scales_and_equalised_weights() -> None:
    assert "weight_scaling" in repr(DenseProjection(4, 4, weight_scaling=True))
    assert "weight_scaling" not in repr(DenseProjection(4, 4))
    for scale, shown in ((16.0, True), (1.0, False)):
        for layer in (StandardMap(9, 4, scale=scale), AdaptiveMap(9, 4, (3,), division=1, scale=scale)):
            assert ("scale=16" in repr(layer)) is shown
