import torch

from torchdefine.modes import untouched


def test_modules_with_something_around_them_are_not_untouched() -> None:
    class Adapted(torch.nn.Linear):
        pass

    assert untouched(torch.nn.Linear(2, 2))
    assert not untouched(Adapted(2, 2))
    assert not untouched(torch.nn.Sequential(torch.nn.Linear(2, 2), Adapted(2, 2)))
    hooked, prepared, replaced = (torch.nn.Linear(2, 2) for _ in range(3))
    hooked.register_forward_hook(lambda *given: None)
    prepared.register_forward_pre_hook(lambda *given: None)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert not any(untouched(module) for module in (hooked, prepared, replaced))
