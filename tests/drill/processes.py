"""Processes that are killed, and processes that have too little of something."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.drill.room import Room
from tests.drill.watch import HANGS_AFTER, Watch
from torchdefine import DeFINE, load_run
from torchdefine.data import encode_corpus
from torchdefine.errors import UserError
from torchdefine.run import RunFolder
from torchdefine.run.checkpoint_file import read_checkpoint

TRAIN = """
import sys
from torchdefine import train
print("ready", flush=True)
train(sys.argv[1], out=sys.argv[2]) if sys.argv[3] == "new" else train(out=sys.argv[2], resume=True)
"""
SAVE = """
import sys, torch
from torchdefine import DeFINE
torch.manual_seed(0)
both = DeFINE(2000, 64, 16, 64), DeFINE(2000, 64, 24, 96)
print("ready", flush=True)
while True:
    for one in both:
        one.save(sys.argv[1])
"""
ENCODE = """
import sys
from torchdefine.data import encode_corpus
print("ready", flush=True)
encode_corpus(sys.argv[1], cache=sys.argv[2])
"""
LIMITED = """
import resource, sys
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), int(sys.argv[2])))
from torchdefine.cli import main
main(sys.argv[3:])
"""
PEAK = """
import contextlib, sys
from torchdefine.cli import main
with contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmPeak")))
"""
MOST_KILLS_OF_A_RUN = 8


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def killed_after(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it was still there to be killed so long after it was ready."""
    assert process.stdout is not None
    with process, process.stdout as said:
        said.readline()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            return True
    return False


def reached(run: Path) -> dict[str, Any]:
    """What a finished run came to: its weights, its losses, its numbers; not its times."""
    folder = RunFolder(run)
    result = folder.read_result()
    files = {which: read_checkpoint(getattr(folder, which)).tensors for which in ("best", "last")}
    tensors = {f"{which} {name}": tensor for which, found in files.items() for name, tensor in found.items()}
    losses = [(record["step"], record["loss"]) for record in result["train_curve"]]
    return {"tensors": tensors, "losses": losses, "perplexity": result["test_perplexity"], "steps": result["steps"]}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = one["tensors"], other["tensors"]
    alike = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    return alike and all(one[name] == other[name] for name in ("losses", "perplexity", "steps"))


def drill_killed_training(room: Room, folder: Path, seed: int | str, count: int) -> Watch:
    """Runs that are killed at random times end as one that was not; each kill is a case."""
    random_, watch, wanted = random.Random(seed), Watch(), reached(room.long_run)
    began = time.monotonic()
    killed_after(start(TRAIN, room.long, folder / "timed", "new"), HANGS_AFTER)
    usual, number = time.monotonic() - began, 0
    while watch.cases < count:
        number, run, at_most = number + 1, folder / f"run-{number}", min(MOST_KILLS_OF_A_RUN, count - watch.cases)
        kills = 0
        while kills < at_most:
            how = "on" if (run / "config.yaml").exists() else "new"
            if not killed_after(start(TRAIN, room.long, run, how), random_.uniform(0, 0.7) * usual):
                break
            kills += 1
        else:
            how = "on" if (run / "config.yaml").exists() else "new"
            if killed_after(start(TRAIN, room.long, run, how), HANGS_AFTER):
                watch.fail("it hung")
        with watch.case(f"a run that was killed {kills} times, and went on"):
            if not same(reached(run), wanted):
                watch.fail("it ended otherwise than the one that was not killed")
        watch.cases += max(kills, 1) - 1
    return watch


def drill_killed_saving(room: Room, folder: Path, seed: int | str, count: int) -> Watch:
    """An embedding that is saved again and again is one of the two that are saved, whenever the process ends."""
    random_, watch, place = random.Random(seed), Watch(), folder / "saved"
    torch.manual_seed(0)
    states = [embedding.state_dict() for embedding in (DeFINE(2000, 64, 16, 64), DeFINE(2000, 64, 24, 96))]
    for _ in range(count):
        killed_after(start(SAVE, place), random_.uniform(0, 0.5))
        with watch.case("an embedding that was being saved"):
            if (place / "embedding.safetensors").exists():
                found = DeFINE.load(place).state_dict()
                alike = (state for state in states if state.keys() == found.keys())
                if not any(all(map(torch.equal, found.values(), state.values())) for state in alike):
                    watch.fail("it is neither the one nor the other")
    return watch


def drill_killed_encoding(room: Room, folder: Path, seed: int | str, count: int) -> Watch:
    """A text whose encoding was killed is encoded anew, or whole."""
    random_, watch = random.Random(seed), Watch()
    began = time.monotonic()
    tokens = encode_corpus(room.corpus, cache=folder / "sound").splits["train"].tokens.tolist()
    usual = time.monotonic() - began
    for _ in range(count):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            killed_after(start(ENCODE, room.corpus, cache), random_.uniform(0, 1) * usual)
            with watch.case("a text that was being encoded"):
                if encode_corpus(room.corpus, cache=cache).splits["train"].tokens.tolist() != tokens:
                    watch.fail("other tokens")
    return watch


def drill_limits(room: Room, folder: Path, seed: int | str, count: int) -> Watch:
    """Little memory, few open files, files that cannot grow, and a full device to print to."""
    random_, watch, run = random.Random(seed), Watch(), folder / "run"
    subprocess.run(["cp", "-r", room.run, run], check=True)
    before = load_run(run).evaluate("test").perplexity
    usual = _address_space("eval", run)
    limits: dict[str, Callable[[], int]] = {
        "RLIMIT_AS": lambda: int(random_.uniform(0.1, 1.2) * usual),
        "RLIMIT_NOFILE": lambda: random_.randrange(4, 40),
        "RLIMIT_FSIZE": lambda: random_.randrange(60_000),
        "RLIMIT_CORE": lambda: 0,  # as usual, but into a full device
    }
    for number in range(count - 1):
        name = random_.choice(list(limits))
        size = limits[name]()
        words = random_.choice(
            [
                ["eval", run],
                ["generate", run, "--length", "5"],
                ["compare", run],
                ["cache", run],
                ["train", room.short, "--out", folder / f"limited-{number}", "--train.steps", "3"],
                ["--help"],
            ]
        )
        with watch.case(f"{name} {size}, {words[0]}"), open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", LIMITED, name, str(size), *map(str, words)],
                stdout=full if name == "RLIMIT_CORE" else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=HANGS_AFTER,
                env={**os.environ, "TORCHDEFINE_CACHE": str(folder / "cache")},
            )
            # Below what Python and torch need to start, it is Python or C++ that says so.
            ours, aborted = "torchdefine" in done.stderr, done.returncode == -signal.SIGABRT
            theirs = aborted and "bad_alloc" in done.stderr
            if (done.returncode not in (0, 1) and not theirs) or (ours and "Traceback" in done.stderr):
                watch.fail(f"ended with {done.returncode}: {done.stderr}")
            if done.returncode == 1 and done.stderr.startswith("torchdefine: "):
                watch.refused(done.stderr.strip().split("\n")[-1])
            if name == "RLIMIT_CORE" and words[0] != "train" and done.returncode != 1:
                watch.fail("a full device was not noticed")
    with watch.case("after all that"):
        try:
            if load_run(run).evaluate("test").perplexity != before:
                watch.fail("the run is another one now")
        except UserError as error:
            watch.fail(str(error))
    return watch


def _address_space(*words: object) -> int:
    """Bytes that a command takes of it at most; a torch that knows GPUs takes several times as much."""
    done = subprocess.run([sys.executable, "-c", PEAK, *map(str, words)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) << 10
