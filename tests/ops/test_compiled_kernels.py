"""What Triton's compiler makes of the kernels between products for an H200, which needs no GPU."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from tests.ops.compiling import INTERPRETED, OLDER, compile_kernel, compiles_without_gpu

pytestmark = compiles_without_gpu
KINDS = {
    **dict.fromkeys(("z", "out", "gradient", "grad_z", "update", "read", "grad_update", "values"), "*bf16"),
    **dict.fromkeys(("rows", "columns", "width", "together", "apart", "dropped", "number"), "i32"),
    **dict.fromkeys(("tokens", "groups", "chunk", "room", "next_groups", "next_chunk", "next_room"), "i32"),
    **dict.fromkeys(("seen", "seen_share", "hidden_share", "hidden_start"), "i32"),
    **dict.fromkeys(("leaving", "entering", "of_leaving", "of_entering"), "*bf16"),
    **dict.fromkeys(("from_inputs", "recurrent", "outputs", "gates", "incoming", "transposed", "grad_gates"), "*bf16"),
    **dict.fromkeys(("length", "programs", "channels"), "i32"),
    **dict.fromkeys(("forget", "candidates", "cells", "upstream", "grad_forget", "grad_candidates"), "*bf16"),
    "counters": "*i32",
    **dict.fromkeys(("inverse_share", "eps"), "fp32"),
    "seed": "*i64",
}
ROUND_NUMBERS = (
    "columns",
    "width",
    "channels",
    "apart",
    "number",
    "chunk",
    "room",
    "next_chunk",
    "next_room",
    "hidden_share",
)


@pytest.mark.skipif(not INTERPRETED, reason="is no interpreter, and so compiles by itself")
def test_the_compiler_takes_them() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "compiled_", __file__]
    finished = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout
    assert "passed" in finished.stdout


def compiled(kernel: Any, launch: dict[str, int], capability: int = 90, **constants: Any) -> Any:
    """For rows whose length is a multiple of 16; what has no kind above is float32."""
    constants |= {name: value for name, value in launch.items() if name in kernel.arg_names}
    kinds = {name: KINDS.get(name, "*fp32") for name in kernel.arg_names if name not in constants}
    options = {name: launch[name] for name in ("num_warps", "num_stages") if name in launch}
    return compile_kernel(kernel, kinds, constants, ROUND_NUMBERS, options, capability)


def wide_products(code: str) -> int:
    """Each round of Philox has two, but for the first ones, which meet zeros."""
    return len(re.findall(r"mul\.hi\.u32", code))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_compiled_relu_draws_once_for_eight_features_and_reads_ahead() -> None:
    from torchdefine.ops import dropout_kernels as kernels

    forward = compiled(kernels._relu_forward, kernels.TILE, biased=True, masked=True).asm["ptx"]
    features = kernels.TILE["tile_rows"] * kernels.TILE["tile_columns"] // (32 * kernels.TILE["num_warps"])
    assert 0 < wide_products(forward) <= 2 * 7 * features // 8
    assert "st.global.v4.b32" in forward
    backward = compiled(kernels._relu_backward, kernels.STRIP, summed=True).asm["ptx"]
    assert "cp.async.cg" in backward
    assert "st.global.v4.b32" in backward


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("width", [128, 384, 2048, 4096])
def test_compiled_norms_draw_once_for_a_threads_features_and_read_ahead(width: int) -> None:
    from torchdefine.ops import residual_norm_kernels as kernels

    launch = kernels.forward_launch(width)
    forward = compiled(kernels._norm_forward, launch, biased=True, masked=True, exact_too=True)
    features = launch["tile_rows"] * launch["tile_columns"] // (32 * launch["num_warps"])
    assert 0 < wide_products(forward.asm["ptx"]) <= 2 * 7 * -(-features // 8)
    launch = kernels.backward_launch(width)
    backward = compiled(kernels._norm_backward, launch, has_past=True, has_read=True, masked=True, pre=False)
    features = launch["tile_rows"] * launch["tile_columns"] // (32 * launch["num_warps"])
    assert 0 < wide_products(backward.asm["ptx"]) <= 2 * 7 * -(-features // 8)
    assert ("cp.async.cg" in backward.asm["ptx"]) == (launch["stages"] > 1)
    assert max(forward.metadata.shared, backward.metadata.shared) <= 99 * 1024  # of the smallest GPUs that we take


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_compiled_sums_read_and_write_sixteen_bytes_at_once() -> None:
    from torchdefine.ops import sum_kernels as kernels

    rows = {"tile_rows": 512, "tile_columns": 16, "num_warps": 8}
    assert "ld.global.v4.b32" in compiled(kernels._sum_rows, rows, onto=True).asm["ptx"]
    values = {"at_once": kernels.VALUES_AT_ONCE, "num_warps": 8}
    assert "st.global.v4.b32" in compiled(kernels._add_onto, values).asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("chunk", [320, 1120])
def test_compiled_seams_of_round_chunks_read_and_write_sixteen_bytes_at_once(chunk: int) -> None:
    from torchdefine.ops import group_stack_kernels as kernels
    from torchdefine.ops.group_stack import Seam, StackForm

    seam = Seam(2, chunk, chunk, 1, 2 * chunk + 256, 2 * chunk + 256, StackForm(256, True, "gelu", 1e-5))
    kinds = {"biased": True, "normed": True, "sees": True, "mixed": True, "activation": "gelu"}
    forward = compiled(kernels._seam_forward, kernels._launch(seam, kernels.TILE, 8), **kinds)
    assert "ld.global.v4.b32" in forward.asm["ptx"]
    backward = compiled(kernels._seam_backward, kernels._launch(seam, kernels.BACKWARD_TILE, 4), fresh=False, **kinds)
    wide = "ld.global.v2.b32" if chunk == 320 else "ld.global.v4.b32"  # four or eight features of a thread
    assert wide in backward.asm["ptx"]
    assert max(forward.metadata.shared, backward.metadata.shared) <= 99 * 1024


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_compiled_recurrences_read_ahead_and_leave_room_for_a_second_process(rows: int) -> None:
    from torchdefine.ops import lstm_kernels as kernels

    sizes = {"width": 1024, "units": kernels.UNITS_PER_PROGRAM}
    forward = compiled(kernels._lstm_forward, kernels.FORWARD_LAUNCH[rows], **sizes)
    backward = compiled(kernels._lstm_backward, kernels.BACKWARD_LAUNCH[rows], **sizes)
    for kernel in (forward, backward):
        assert "cp.async.cg" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= (227 if OLDER else 113) * 1024  # two programs share a multiprocessor's 227 KiB
    if rows >= 64:  # a warp group takes 64 rows, and all gates at once
        assert "wgmma.mma_async.sync.aligned.m64n64k16" in forward.asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.skipif(OLDER, reason="the older compiler takes more room, which only large GPUs have")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_compiled_recurrences_fit_the_smallest_of_the_gpus_that_we_take(rows: int) -> None:
    from torchdefine.ops import lstm_kernels as kernels

    sizes = {"width": 1024, "units": kernels.UNITS_PER_PROGRAM}
    for kernel, launches in (
        (kernels._lstm_forward, kernels.FORWARD_LAUNCH),
        (kernels._lstm_backward, kernels.BACKWARD_LAUNCH),
    ):
        assert compiled(kernel, launches[rows], capability=86, **sizes).metadata.shared <= 99 * 1024


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("peeps", [False, True])
def test_compiled_light_recurrences_read_ahead(peeps: bool) -> None:
    from torchdefine.ops import light_recurrence_kernels as kernels

    for kernel in (kernels._forward, kernels._backward):
        made = compiled(kernel, kernels.LAUNCH, peeps=peeps)
        assert "cp.async.ca" in made.asm["ptx"]
        assert made.metadata.shared <= 99 * 1024
