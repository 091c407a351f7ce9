"""Without a GPU, kernels are run by Triton's interpreter, if Triton is installed: slow, and with the same numbers."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


@pytest.fixture
def kernel_device() -> str:
    """Where kernels run here."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"
