"""Where the tests of what Triton's compiler makes of our kernels can run."""

import os
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
OLDER = HAS_TRITON and tuple(map(int, version("triton").split(".")[:2])) < (3, 3)

compiles_without_gpu = pytest.mark.skipif(
    not HAS_TRITON or OLDER or torch.cuda.is_available(),
    reason="needs Triton 3.3 or newer, whose compiler is called so, and tells nothing new where there is a GPU",
)
