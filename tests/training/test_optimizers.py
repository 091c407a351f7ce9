import pytest
import torch
from torch import nn

from torchdefine.recipe import OptimSettings
from torchdefine.training.optimizers import make_optimizer


@pytest.mark.parametrize(
    ("name", "kind", "own"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.3}),
        ("adam", torch.optim.Adam, {"betas": (0.7, 0.8)}),
        ("adamw", torch.optim.AdamW, {"betas": (0.7, 0.8)}),
    ],
)
def test_an_optimiser_gets_its_settings(name: str, kind: type, own: dict) -> None:
    settings = OptimSettings(optimizer=name, lr=0.5, momentum=0.3, beta1=0.7, beta2=0.8, weight_decay=0.01)
    optimizer = make_optimizer([nn.Parameter(torch.zeros(2))], settings, torch.device("cpu"))
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    for setting, value in {"lr": 0.5, "weight_decay": 0.01, **own}.items():
        assert group[setting] == value
