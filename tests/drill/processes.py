"""Processes that are killed, and processes that have too little of something."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.drill.watch import Watch
from torchdefine import DeFINE, load_run
from torchdefine.data import encode_corpus
from torchdefine.errors import UserError
from torchdefine.run import RunFolder
from torchdefine.run.checkpoint_file import read_checkpoint

TRAIN = """
import sys
from torchdefine import train
train(sys.argv[1], out=sys.argv[2], resume=sys.argv[3] == "on") if sys.argv[3] == "new" else \\
    train(out=sys.argv[2], resume=True)
"""
SAVE = """
import sys, torch
from torchdefine import DeFINE
torch.manual_seed(0)
both = DeFINE(2000, 64, 16, 64), DeFINE(2000, 64, 24, 96)
while True:
    for one in both:
        one.save(sys.argv[1])
"""
ENCODE = """
import sys
from torchdefine.data import encode_corpus
encode_corpus(sys.argv[1], cache=sys.argv[2])
"""
LIMITED = """
import resource, sys
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), int(sys.argv[2])))
from torchdefine.cli import main
main(sys.argv[3:])
"""


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def killed_after(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it was still there to be killed."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
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


def drill_kills(recipe: Path, whole: Path, corpus: Path, room: Path, seed: int, count: int) -> Watch:
    """Training, saving and encoding are killed at random times; what is there afterwards is whole, or begins anew."""
    random_, watch = random.Random(seed), Watch("kills")
    wanted, kills, number = reached(whole), 0, 0
    began = time.monotonic()
    start(TRAIN, recipe, room / "timed", "new").wait()
    usual = time.monotonic() - began
    while kills < count // 2:
        number += 1
        run = room / f"run-{number}"
        for _ in range(8):
            is_new = not (run / "config.yaml").exists()
            if not killed_after(start(TRAIN, recipe, run, "new" if is_new else "on"), random_.uniform(0.4, 1) * usual):
                break
            kills += 1
            watch.cases += 1
        else:
            start(TRAIN, recipe, run, "on").wait()
        with watch.case("a run that was killed, and went on"):
            watch.cases -= 1
            if not same(reached(run), wanted):
                watch.fail("it ended otherwise than the one that was not killed")
    both = [embedding.state_dict() for embedding in _two_embeddings()]
    for _ in range(count // 4):
        killed_after(start(SAVE, room / "saved"), random_.uniform(1.2, 2.5) * usual / 2)
        with watch.case("an embedding that was being saved"):
            if (room / "saved" / "embedding.safetensors").exists():
                found = DeFINE.load(room / "saved").state_dict()
                if not any(
                    found.keys() == state.keys() and all(map(torch.equal, found.values(), state.values()))
                    for state in both
                ):
                    watch.fail("it is neither the one nor the other")
    tokens = encode_corpus(corpus, cache=room / "sound").splits["train"].tokens.tolist()
    for _ in range(count - watch.cases):
        with tempfile.TemporaryDirectory(dir=room) as cache:
            killed_after(start(ENCODE, corpus, cache), random_.uniform(0.5, 1.0) * usual / 2)
            with watch.case("a text that was being encoded"):
                if encode_corpus(corpus, cache=cache).splits["train"].tokens.tolist() != tokens:
                    watch.fail("other tokens")
    return watch


def _two_embeddings() -> list[DeFINE]:
    torch.manual_seed(0)
    return [DeFINE(2000, 64, 16, 64), DeFINE(2000, 64, 24, 96)]


def drill_limits(run: Path, recipe: Path, room: Path, seed: int, count: int) -> Watch:
    """Little memory, few open files, small files in place of a full disk, and a full device to print to."""
    random_, watch = random.Random(seed), Watch("limits and full disks")
    before = load_run(run).evaluate("test").perplexity
    for number in range(count):
        name, size = random_.choice(
            [
                ("RLIMIT_AS", random_.randrange(200 << 20, 2500 << 20)),
                ("RLIMIT_NOFILE", random_.randrange(4, 40)),
                ("RLIMIT_FSIZE", random_.randrange(0, 60_000)),
                ("RLIMIT_CORE", 0),  # as usual, but into a full device
            ]
        )
        words = random_.choice(
            [
                ["eval", run],
                ["generate", run, "--length", "5"],
                ["compare", run],
                ["cache", run],
                ["train", recipe, "--out", room / f"limited-{number}", "--train.steps", "3"],
                ["--help"],
            ]
        )
        with watch.case(f"{name} {size}, {words[0]}"), open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", LIMITED, name, str(size), *map(str, words)],
                stdout=full if name == "RLIMIT_CORE" else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TORCHDEFINE_CACHE": str(room / "cache")},
            )
            # Below what Python itself needs to start, it is Python that says so.
            ours = "torchdefine" in done.stderr
            if done.returncode not in (0, 1) or (ours and "Traceback" in done.stderr):
                watch.fail(f"ended with {done.returncode}: {done.stderr[-1500:]}")
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
