import torch
from torch import nn

from torchdefine.modes import untouched


def test_modules_with_something_around_them_are_not_untouched() -> None:
    class Adapted(nn.Linear):
        pass

    def whole(part: nn.Module) -> nn.Module:
        return nn.Sequential(part)

    assert untouched(whole(nn.Linear(2, 2)), nn.Linear)
    assert not untouched(whole(nn.Linear(2, 2)), nn.LayerNorm)
    assert not untouched(whole(Adapted(2, 2)), nn.Linear)
    hooked, prepared, replaced = (nn.Linear(2, 2) for _ in range(3))
    hooked.register_forward_hook(lambda *given: None)
    prepared.register_forward_pre_hook(lambda *given: None)
    replaced.forward = lambda x: torch.zeros_like(x)  # type: ignore[method-assign]
    for part in (hooked, prepared, replaced):
        assert not untouched(part, nn.Linear)
        assert not untouched(whole(part), nn.Linear)
