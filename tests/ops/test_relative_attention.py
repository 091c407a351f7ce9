"""Plain torch against a loop over positions, and the kernels against plain torch in float64.

Without a GPU, the kernels are read by Triton's interpreter and compiled for an H200, where Triton is installed.
"""

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.ops.compiling import INTERPRETED, compile_kernel, compiles_without_gpu
from torch import Tensor

from torchdefine.ops.relative_attention import (
    Scoring,
    has_attention_kernel,
    relative_attention,
    visible,
)

by_kernels = partial(relative_attention, impl="kernel")
in_plain_torch = partial(relative_attention, impl="torch")


def inputs(
    streams: int, queries: int, remembered: int, heads: int, width: int, dim: int = 12
) -> tuple[list[Tensor], Tensor]:
    """In float64: own, remembered, weight, bias and distances; and a gradient of the result."""
    columns, features = -(-(remembered + queries) // 16) * 16, heads * width
    bias = torch.cat((torch.randn(features), torch.zeros(2 * features)))
    given = [
        torch.randn(streams, queries, dim),
        torch.randn(streams, remembered, dim),
        torch.randn(3 * features, dim) / math.sqrt(dim),
        bias,
        torch.randn(columns, heads, width),
    ]
    return [tensor.double() for tensor in given], torch.randn(streams, queries, features).double()


def results(way, given: list[Tensor], upstream: Tensor, scoring: Scoring, like: Tensor) -> list[Tensor]:
    """What ``way`` gives in the dtype and place of ``like``, and its gradients, in float64 on the CPU."""
    used = [tensor.to(like).requires_grad_() for tensor in given]
    moved = scoring._replace(filled=scoring.filled.to(like.device))
    output = way(*used, moved)
    gradients = list(torch.autograd.grad(output, used, upstream.to(like), materialize_grads=True))
    gradients[3] = gradients[3][: upstream.shape[-1]]  # keys and values have no bias
    return [tensor.detach().double().cpu() for tensor in (output, *gradients)]


def naive(own: Tensor, remembered: Tensor, weight: Tensor, bias: Tensor, distances: Tensor, scoring: Scoring) -> Tensor:
    heads, width = distances.shape[1:]
    memory, features = remembered.shape[1], heads * width
    streams = []
    for stream in range(len(own)):
        positions = [*remembered[stream], *own[stream]]
        rows = []
        for i in range(memory, len(positions)):
            parts = []
            for head in range(heads):
                one = slice(head * width, (head + 1) * width)
                query = weight[one] @ positions[i] + bias[one]
                scores, values = [], []
                for j in range(memory - int(scoring.filled), i + 1):
                    if scoring.same_length and i - j >= memory:
                        continue
                    key = weight[features : 2 * features][one] @ positions[j]
                    distance = distances[len(positions) - 1 - (i - j), head]
                    scores.append((query @ key + query @ distance) * scoring.scale)
                    values.append(weight[2 * features :][one] @ positions[j])
                shares = torch.stack(scores).softmax(0)
                parts.append(sum(share * value for share, value in zip(shares, values, strict=True)))
            rows.append(torch.cat(parts))
        streams.append(torch.stack(rows))
    return torch.stack(streams)


@example(queries=1, remembered=1, filled=0, same_length=True)
@example(queries=5, remembered=2, filled=2, same_length=True)
@example(queries=4, remembered=6, filled=3, same_length=False)
@example(queries=4, remembered=0, filled=0, same_length=False)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 7), st.booleans())
@settings(max_examples=10)
def test_plain_torch_equals_a_loop_over_positions(
    queries: int, remembered: int, filled: int, same_length: bool
) -> None:
    scoring = Scoring(torch.tensor([min(filled, remembered)]), same_length, 0.7)
    given, upstream = inputs(2, queries, remembered, heads=2, width=3, dim=4)
    like = torch.empty(0, dtype=torch.float64)
    for ours, expected in zip(
        results(in_plain_torch, given, upstream, scoring, like),
        results(naive, given, upstream, scoring, like),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected)


def test_what_may_be_seen() -> None:
    everything = Scoring(torch.tensor([2]), False, 1.0)
    assert visible(2, 2, everything).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible(2, 2, everything._replace(filled=torch.tensor([1]))).int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 1]]
    assert visible(2, 2, everything._replace(same_length=True)).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_without_a_gpu_there_are_no_kernels_and_plain_torch_is_used() -> None:
    assert not has_attention_kernel(torch.device("cpu"), torch.bfloat16, 48)
    given, _ = inputs(1, 3, 4, heads=2, width=8)
    scoring = Scoring(torch.tensor([4]), False, 1.0)
    assert torch.equal(relative_attention(*given, scoring), in_plain_torch(*given, scoring))


MASKS = [
    # streams, queries, remembered, heads, width, filled, same_length
    (2, 70, 75, 2, 16, 75, False),
    (1, 7, 9, 2, 8, 4, False),
    (1, 1, 65, 1, 24, 30, True),
    (1, 40, 100, 1, 48, 100, True),
    (1, 130, 3, 1, 8, 0, False),
    (1, 33, 130, 1, 8, 9, True),
    (2, 70, 0, 2, 16, 0, False),
]


@pytest.mark.usefixtures("_forgotten_memory_is_nan")
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("streams", "queries", "remembered", "heads", "width", "filled", "same_length"), MASKS)
def test_interpreted_kernels_equal_plain_torch_with_gradients(
    streams: int,
    queries: int,
    remembered: int,
    heads: int,
    width: int,
    filled: int,
    same_length: bool,
    dtype: torch.dtype,
) -> None:
    given, upstream = inputs(streams, queries, remembered, heads, width)
    scoring = Scoring(torch.tensor([filled]), same_length, width**-0.5)
    exact = results(in_plain_torch, given, upstream, scoring, given[0])
    ours = results(by_kernels, given, upstream, scoring, torch.empty(0, dtype=dtype))
    close = 2e-6 if dtype == torch.float32 else 4e-3
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).norm() <= close * other.norm()


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_interpreted_kernels_leave_out_gradients_that_nobody_wants() -> None:
    given, upstream = inputs(1, 5, 6, heads=2, width=8)
    scoring = Scoring(torch.tensor([6]), False, 0.5)
    *_, weight, bias, distances = results(by_kernels, given, upstream, scoring, torch.empty(0))
    used = [tensor.float() for tensor in given]
    trained = [tensor.requires_grad_() for tensor in used[2:]]
    ours = torch.autograd.grad(by_kernels(*used, scoring), trained, upstream.float())
    assert torch.equal(ours[0].double(), weight)
    assert torch.equal(ours[1][: len(bias)].double(), bias)
    assert torch.equal(ours[2].double(), distances)


@compiles_without_gpu
@pytest.mark.skipif(not INTERPRETED, reason="is no interpreter, and so compiles by itself")
def test_the_compiler_takes_them() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "compile_for", __file__]
    finished = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout
    assert "passed" in finished.stdout


@compiles_without_gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("one", [False, True], ids=["many", "one stream and query"])
@pytest.mark.parametrize(("width", "padded"), [(8, 16), (48, 64), (104, 128)])
def test_kernels_compile_for_an_h200_and_fit(width: int, padded: int, one: bool) -> None:
    from torchdefine.ops import relative_attention_kernels as kernels
    from torchdefine.ops import relative_attention_launch as launching

    sizes = launching.Sizes(1, 1, 1, 10, width, 16)
    rows = {**launching.PREPARE, "block_keys": 64, "num_stages": 3}
    for kernel, launch in (
        (kernels.attention_forward, launching._launch(launching.FORWARD, sizes)),
        (kernels.attention_prepare, rows),
        (kernels.attention_key_gradients, launching._launch(launching.KEY_GRADIENTS, sizes)),
        (kernels.attention_query_gradients, launching._launch(launching.QUERY_GRADIENTS, sizes)),
    ):
        fixed = {"heads": 10, "width": width, "padded": padded, "same_length": True, **launch}
        fixed.update({"streams": 1, "queries": 1} if one else {})
        constants = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        kinds = {"filled": "*i64", "log_sums": "*fp32", "overlaps": "*fp32", "sums": "*fp32"}
        numbers = dict.fromkeys(("streams", "queries", "remembered", "columns"), "i32")
        factors = dict.fromkeys(("scale", "scale_to_base_2"), "fp32")
        kinds |= numbers | factors
        kinds = {name: kinds.get(name, "*bf16") for name in kernel.arg_names if name not in constants}
        options = {name: launch[name] for name in ("num_warps", "num_stages")}
        compiled = compile_kernel(kernel, kinds, constants, ["columns"], options)
        assert compiled.metadata.shared <= 99 * 1024  # what the smallest of the GPUs that we take has
        code = compiled.asm["ptx"]
        if kernel is kernels.attention_prepare:
            assert "st.global.b16" not in code  # zeros go sixteen bytes at once
            assert "st.global.v4.b32" in code
            continue
        assert "wgmma.mma_async" in code
        if width > 8:  # sixteen bytes at once: the compiler knows of the alignment
            assert ("cp.async.cg" if launch["num_stages"] > 1 else "ld.global.v4.b32") in code


@pytest.mark.gpu
@pytest.mark.usefixtures("_forgotten_memory_is_nan")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("streams", "queries", "remembered", "heads", "width", "filled", "same_length"),
    [*MASKS, (6, 150, 150, 10, 48, 150, False), (2, 64, 640, 10, 48, 640, True), (3, 37, 50, 4, 104, 20, False)],
)
def test_kernels_equal_float64_as_well_as_plain_torch_does(
    streams: int,
    queries: int,
    remembered: int,
    heads: int,
    width: int,
    filled: int,
    same_length: bool,
    dtype: torch.dtype,
) -> None:
    given, upstream = inputs(streams, queries, remembered, heads, width, dim=64)
    scoring = Scoring(torch.tensor([filled]), same_length, width**-0.5)
    like = torch.empty(0, device="cuda", dtype=dtype)
    given = [tensor.to(dtype).double() for tensor in given]  # what is rounded beforehand is nobody's error
    exact = results(in_plain_torch, given, upstream, scoring, given[0])
    plain = results(in_plain_torch, given, upstream, scoring, like)
    ours = results(relative_attention, given, upstream, scoring, like)
    close = {torch.float16: 3e-3, torch.bfloat16: 2.5e-2}[dtype]
    for one, other, expected in zip(ours, plain, exact, strict=True):
        assert (one - expected).norm() <= 2 * (other - expected).norm() + 0.2 * close * expected.norm()
        assert (one - expected).norm() <= close * expected.norm()


@pytest.mark.gpu
def test_kernels_never_wait_and_can_be_recorded() -> None:
    given, upstream = inputs(4, 50, 60, heads=3, width=16, dim=32)
    used = [tensor.to("cuda", torch.bfloat16).requires_grad_() for tensor in given]
    upstream = upstream.to("cuda", torch.bfloat16)
    filled = torch.tensor([60], device="cuda")

    def work() -> list[Tensor]:
        output = relative_attention(*used, Scoring(filled, False, 0.25))
        return [output.detach(), *torch.autograd.grad(output, used, upstream)]  # no graph of another stream stays alive

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    graph.replay()
    for one, other in zip(recorded, expected, strict=True):
        assert torch.equal(one, other)
    filled.fill_(7)  # the graph reads it anew
    graph.replay()
    for one, other in zip(recorded, work(), strict=True):
        assert torch.equal(one, other)
