"""Whole AWD-LSTM training steps in every precision: ours, recorded and not, beside a plain loop over stock modules.

The shape is that of the Penn Treebank recipe: three layers of 1150, batch 20, 70 tokens, 10,000 words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.measuring import Contestant, Group, Setting, times_faster
from benchmarks.records import Benchmark
from benchmarks.steps import FAMILIES, NO_GPU, Place, our_step, plain_step
from torchdefine.recipe import load_recipe, merged

FAMILY = next(family for family in FAMILIES if family.name == "AWD-LSTM")


def in_precision(name: str, precision: str, setting: Setting) -> Any:
    changes = merged(FAMILY.changes, FAMILY.small) if setting.small else FAMILY.changes
    return load_recipe(name, merged(changes, {"train": {"precision": precision}}))


def contestants(setting: Setting, place: Place) -> Iterator[Contestant]:
    for precision in ("tf32", "fp32", "bf16", "fp16") if setting.on_gpu else ("fp32",):
        recipe = in_precision(FAMILY.without, precision, setting)
        yield Contestant(f"plain loop, {precision}", lambda r=recipe: plain_step(FAMILY, r, place))  # type: ignore[misc]
    for precision in ("tf32", "bf16", "fp16") if setting.on_gpu else ("fp32",):
        recipe = in_precision(FAMILY.without, precision, setting)
        for recorded in (False, True):
            yield Contestant(
                f"ours, {precision}, {'recorded' if recorded else 'kernel by kernel'}",
                lambda r=recipe, kept=recorded: our_step(r, place, kept),  # type: ignore[misc]
                NO_GPU if recorded and not setting.on_gpu else "",
            )
    last = "bf16" if setting.on_gpu else "fp32"
    define = in_precision(FAMILY.with_define, last, setting)
    yield Contestant(
        f"ours with DeFINE, {last}, {'recorded' if setting.on_gpu else 'kernel by kernel'}",
        lambda: our_step(define, place, recorded=setting.on_gpu),
    )


def groups(setting: Setting) -> Iterator[Group]:
    place = FAMILY.place(setting)
    goal = times_faster("ours, bf16, recorded", "plain loop, bf16", 2)
    rows, length = place.inputs[0].shape
    yield Group("AWD-LSTM", list(contestants(setting, place)), [goal], f"{rows} rows of {length} tokens")


BENCHMARK = Benchmark("awd-lstm", "AWD-LSTM training steps in every precision, recorded and not", groups)
