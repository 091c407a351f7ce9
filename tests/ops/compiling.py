"""What Triton's compiler makes of a kernel, which needs no GPU; and where such tests can run."""

import os
from collections.abc import Collection, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
OLDER = HAS_TRITON and tuple(map(int, version("triton").split(".")[:2])) < (3, 3)
"""Than the compiler whose code tests look at, and called in another way: what it must do is take the kernels."""

compiles_without_gpu = pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available(),
    reason="needs Triton, and tells nothing new where there is a GPU",
)


def compile_kernel(
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    round_numbers: Collection[str],
    options: Mapping[str, int],
    capability: int = 90,
) -> Any:
    """For an H200, or a GPU of another compute capability.

    ``kinds`` are those of all arguments but the constants; pointers and ``round_numbers`` are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [names.index(name) for name, kind in kinds.items() if kind[0] == "*" or name in round_numbers]
    if OLDER:
        from triton.backends.compiler import AttrsDescriptor

        facts = {"arg_properties": {"tt.divisibility": aligned}, "cls": "AttrsDescriptor"}
        attributes = AttrsDescriptor.from_dict(facts)
        source = ASTSource(fn=kernel, signature=dict(kinds), constants=dict(constants), attrs=attributes)
    else:
        signature = {name: kinds.get(name, "constexpr") for name in names}
        attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
        source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
