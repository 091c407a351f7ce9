import pytest
import torch
from torch import nn

from torchdefine.training import OPTIMIZERS


@pytest.mark.parametrize(
    ("name", "kind", "own"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.3}),
        ("adam", torch.optim.Adam, {"beta1": 0.7, "beta2": 0.8}),
        ("adamw", torch.optim.AdamW, {"beta1": 0.7, "beta2": 0.8}),
    ],
)
def test_an_optimiser_gets_its_settings(name: str, kind: type, own: dict) -> None:
    config = OPTIMIZERS.read({"kind": name, "lr": 0.5, "weight_decay": 0.01, **own})
    optimizer = config.build([nn.Parameter(torch.zeros(2))], torch.device("cpu"))
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    expected = {"momentum": 0.3} if name == "sgd" else {"betas": (0.7, 0.8)}
    for setting, value in {"lr": 0.5, "weight_decay": 0.01, **expected}.items():
        assert group[setting] == value
