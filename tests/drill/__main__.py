"""The long form of the drill: ``make drill``, or ``python -m tests.drill --workers 12 --out results/drill``.

It is run for some seeds, and at the end for one that nobody has chosen. Parts of it run side by side, each in a process
of its own; what a seed has tried does not depend on their number.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: everything here is of the CPU

import torch

from tests.drill.disks import way_to_mount
from tests.drill.room import Room, exports
from tests.drill.shard import EXPORTING, MOUNTING, PARTS, Part
from tests.drill.watch import Watch
from torchdefine.run.environment import describe_environment

LONGEST_PROCESS = 900
"""Seconds; one that takes longer is ended, and is a failure."""


@dataclass(frozen=True)
class Shard:
    name: str
    number: int
    cases: int

    @property
    def part(self) -> Part:
        return PARTS[self.name]

    def run(self, room: Room, seed: int, before: tuple[str, ...]) -> Watch:
        """In a process, which may break without an end of the others; ``before`` is put before its command."""
        with tempfile.TemporaryDirectory(dir=room.path) as folder:
            found, said = Path(folder) / "found.json", Path(folder) / "said.txt"
            words = ["-m", "tests.drill.shard", room.path, self.name, seed, self.number, self.cases, found]
            with said.open("wb") as output:
                process = subprocess.Popen(
                    [*before, sys.executable, *map(str, words)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                try:
                    process.wait(LONGEST_PROCESS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if found.is_file():
                return Watch.of(json.loads(found.read_text()))
            broken = Watch()
            broken.fail(f"process {self.number} ended with {process.returncode}: {said.read_text(errors='replace')}")
            return broken


def shards(options: argparse.Namespace, lacking: set[str]) -> Iterator[Shard]:
    for name, part in PARTS.items():
        left, number = round(getattr(options, part.counted_by) * part.fraction), 0
        while left > 0 and part.needs not in lacking:
            yield Shard(name, number, min(left, part.at_once))
            left, number = left - part.at_once, number + 1


def drill(room: Room, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Everything with one seed, as a file of results says it."""
    mounting = way_to_mount()
    lacking = {what for what, there in ((MOUNTING, mounting is not None), (EXPORTING, exports())) if not there}
    began, watches = time.monotonic(), {name: Watch() for name in PARTS}
    with ThreadPoolExecutor(options.workers) as pool:
        running = {
            pool.submit(shard.run, room, seed, (mounting or ()) if shard.part.needs == MOUNTING else ()): shard
            for shard in shards(options, lacking)
        }
        for done, future in enumerate(as_completed(running), start=1):
            shard, found = running[future], future.result()
            watches[shard.name].add(found)
            took = f"{time.monotonic() - began:.0f} s: seed {seed}, {done} of {len(running)}"
            print(f"{took}: {shard.name}, {found.cases} cases, {len(found.failures)} failures", flush=True)
            for failure in found.failures:
                print(failure, file=sys.stderr, flush=True)
    parts = {
        name: {"not_run": f"for want of {part.needs}"} if part.needs in lacking else watches[name].facts()
        for name, part in PARTS.items()
    }
    counts = {part.counted_by: getattr(options, part.counted_by) for part in PARTS.values()}
    facts = {"seed": seed, "counts": counts, "workers": options.workers, "seconds": round(time.monotonic() - began)}
    return {**facts, **describe_environment(torch.device("cpu")), "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--not-drawn", action="store_true", help="leave out the seed that is drawn at the end")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for one JSON file a seed")
    for name, usual in (("kills", 60), ("mutations", 300), ("inputs", 5000), ("limits", 60), ("disks", 60)):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"how many cases (default: {usual})")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHDEFINE_CACHE"] = f"{folder}/cache"
        room = Room(Path(folder) / "room").make()
        for chosen in (*options.seeds, *([] if options.not_drawn else [None])):
            seed = random.SystemRandom().randrange(1 << 32) if chosen is None else chosen
            found = drill(room, seed, options)
            name = "drawn" if chosen is None else f"seed-{seed}"
            (options.out / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
            failures += sum(len(part.get("failures", ())) for part in found["parts"].values())
    print(f"{failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
