"""Where the time of a recorded training step goes on a GPU, by kind of kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Contestant, Group, Prepared, Setting, Work
from benchmarks.records import Benchmark
from benchmarks.steps import FAMILIES, NO_GPU, our_step

PROFILED_STEPS = 4
KINDS = {
    "attention": ("attention_", "flash", "fmha", "sdpa"),
    "LSTM": ("_lstm_", "rnn", "lstm"),
    "the unit's seams": ("_seam_",),
    "norms, dropout and ReLU": ("_norm_", "_relu_", "distribution_elementwise"),
    "softmax and loss": ("_softmax_loss", "_column_sums", "_add_onto"),
    "optimiser and clipping": ("multi_tensor_apply",),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitkreduce", "xmma", "gemv"),
    "tables": ("embedding", "index", "gather", "scatter", "radix_sort", "scan"),
    "sums": ("_sum_rows", "reduce_kernel"),
    "copies, conversions and zeros": (
        "copy",
        "memcpy",
        "memset",
        "fill",
        "catarray",
        "_pad",
        "_unpad",
        "_change_width",
    ),
}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other kernels")


def shares_of(work: Work) -> dict[str, Any]:
    """How the time of a few steps divides; nothing runs between the kernels of a recorded step."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED_STEPS):
            work()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()  # microseconds
    kernels = 0
    for event in found.key_averages():
        if event.self_device_time_total > 0:
            spent[kind_of(event.key)] += round(event.self_device_time_total)
            kernels += event.count
    total = spent.total()
    shares = {kind: round(part / total, 4) for kind, part in spent.most_common()}
    return {"shares": shares, "kernels a step": kernels // PROFILED_STEPS}


def prepared(name: str, setting: Setting) -> Prepared:
    family = next(family for family in FAMILIES if name in (family.without, family.with_define))
    step = our_step(family.recipe(name, setting.small), family.place(setting), recorded=True)
    return Prepared(step.work, lambda: {**step.facts(), **shares_of(step.work)}, step.around)


def groups(setting: Setting) -> Iterator[Group]:
    reason = "" if setting.on_gpu else NO_GPU
    for family in FAMILIES:
        contestants = [
            Contestant(name, partial(prepared, name, setting), reason) for name in (family.without, family.with_define)
        ]
        yield Group(family.name, contestants, note=f"shares over {PROFILED_STEPS} steps")


BENCHMARK = Benchmark("step-profile", "whole training steps on a GPU, by kind of kernel", groups)
