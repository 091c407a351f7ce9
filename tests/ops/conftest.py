"""Without a GPU, kernels are run by Triton's interpreter, if Triton is installed: slow, and with the same numbers."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


@pytest.fixture
def kernel_device() -> str:
    """Where kernels run here."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def _forgotten_memory_is_nan() -> Iterator[None]:
    """What a kernel leaves as it was when it should have written it spoils the result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
