import threading

import pytest
import torch

from torchdefine.ops import plain_torch
from torchdefine.ops.kernel_gate import kernels_allowed, kernels_run


def test_no_kernel_within_plain_torch_and_in_no_thread() -> None:
    seen: list[bool] = []
    assert kernels_allowed()
    with plain_torch():
        with plain_torch():
            pass
        assert not kernels_allowed()
        thread = threading.Thread(target=lambda: seen.append(kernels_allowed()))  # as autograd's backward is
        thread.start()
        thread.join()
    assert seen == [False]
    assert kernels_allowed()


def test_it_ends_with_an_error_too() -> None:
    with pytest.raises(KeyError), plain_torch():
        raise KeyError
    assert kernels_allowed()


def test_a_cpu_has_none() -> None:
    assert not kernels_run(torch.ones(1))


@pytest.mark.gpu
def test_a_gpu_has_them_unless_told_otherwise() -> None:
    here = torch.ones(1, device="cuda")
    assert kernels_run(here)
    with plain_torch():
        assert not kernels_run(here)
