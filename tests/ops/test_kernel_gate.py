import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from torchdefine import ops
from torchdefine.ops import has_attention_kernel, plain_torch
from torchdefine.ops.kernel_gate import gpu_takes_kernels, kernels_allowed, kernels_run

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What is asked of a GPU, wherever the test runs."""
    facts = SimpleNamespace(major=9, name="A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.empty(*shape))
    monkeypatch.delattr(ops, "padding_kernels", raising=False)
    gpu_takes_kernels.cache_clear()
    yield facts
    gpu_takes_kernels.cache_clear()


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    before = "Torch's own operations replace our kernels, so half precision is slower: "
    return [record.getMessage().removeprefix(before) for record in caplog.records]


def test_where_no_kernel_can_be_built_that_is_said_once(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("there is no C compiler")

    monkeypatch.setitem(sys.modules, "torchdefine.ops.padding_kernels", SimpleNamespace(pad=fails))
    for _ in range(2):
        assert not has_attention_kernel(GPU, torch.bfloat16, 48)
    assert reasons(caplog) == ["there is no C compiler."]


def test_without_triton_there_are_none(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torchdefine.ops.padding_kernels", None)
    assert not gpu_takes_kernels(GPU)
    assert reasons(caplog) == ["Triton is not installed."]


def test_an_old_gpu_takes_none(gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    gpu.major = 7
    assert not gpu_takes_kernels(GPU)
    assert reasons(caplog) == ["A GPU is older than compute capability 8.0."]


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
