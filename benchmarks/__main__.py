"""Speed and memory, ours beside the alternatives in one process; every run appends a dated row.

python -m benchmarks                     # all of them
python -m benchmarks steps look-up       # some
python -m benchmarks --small             # shapes for two CPU cores, a few minutes
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks import (
    attention,
    awd_lstm,
    decoding,
    demo_profile,
    growth,
    kernels,
    large_tables,
    look_up,
    masked,
    output,
    own_loop,
    recurrent,
    seals,
    shrunk_tables,
    step_profile,
    steps,
    unit,
)
from benchmarks.measuring import Setting
from benchmarks.records import Benchmark, append_record, run
from torchdefine.errors import MachineError, UserError
from torchdefine.spelling import did_you_mean

RESULTS = Path(__file__).parent.parent / "results" / "benchmarks"
MODULES = (
    unit,
    output,
    steps,
    step_profile,
    awd_lstm,
    masked,
    attention,
    kernels,
    recurrent,
    look_up,
    decoding,
    growth,
    large_tables,
    own_loop,
    seals,
    demo_profile,
)
BENCHMARKS = {one.name: one for one in (*(module.BENCHMARK for module in MODULES), *shrunk_tables.BENCHMARKS)}


def chosen(names: list[str]) -> list[Benchmark]:
    for name in names:
        if name not in BENCHMARKS:
            raise UserError(f"The benchmark {name!r} is unknown{did_you_mean(name, BENCHMARKS)}")
    return [BENCHMARKS[name] for name in names or BENCHMARKS]


def setting_of(options: argparse.Namespace) -> Setting:
    if options.repeats is not None and options.repeats < 2:
        raise UserError(f"--repeats is {options.repeats}, but a median with a spread needs at least 2.")
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"The device {name!r} is unknown: use cpu or cuda.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"The benchmarks have no clock for the device {name!r}: use cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device here: use --device cpu.")
    repeats = options.repeats or (7 if options.small else 20)
    return Setting(device, options.small, repeats, options.data, options.compile)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks; all by default")
    made.add_argument("--list", action="store_true", help="say what there is")
    made.add_argument("--small", action="store_true", help="small shapes and fewer repeats, for a CPU")
    made.add_argument("--only", default="", metavar="TEXT", help="contestants whose `group: name` has this in it")
    made.add_argument("--compile", action="store_true", help="steps: compile the plain loops on a CPU too: minutes")
    made.add_argument("--repeats", type=int, help="how many numbers the median is of (20, or 7 with --small)")
    made.add_argument("--out", type=Path, default=RESULTS, help="the folder that the rows are appended in")
    made.add_argument("--device", help="cuda where there is one, else cpu")
    made.add_argument("--data", default="wikitext-2-shuffled", help="the text to take ids from: a name or a folder")
    return made


def measure_all(options: argparse.Namespace) -> None:
    benchmarks, setting = chosen(options.names), setting_of(options)
    for benchmark in benchmarks:
        started = time.monotonic()
        path = append_record(options.out, run(benchmark, setting, options.only))
        print(f"\n  {time.monotonic() - started:.0f} s; a row was appended to {path}.\n", flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.list:
        for benchmark in BENCHMARKS.values():
            print(f"{benchmark.name:22}{benchmark.description}")
        return 0
    torch.set_flush_denormal(True)
    try:
        measure_all(options)
    except (UserError, MachineError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
