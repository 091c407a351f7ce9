"""Disks that fill up, and disks that cannot be written to: small ones in memory, mounted for this process alone.

A process may mount where ``unshare`` lets it, and is then root of a name space of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.drill.inputs import ended_in_a_sentence
from tests.drill.mutations import contents
from tests.drill.processes import reached, same
from tests.drill.room import Room, exports
from tests.drill.watch import Watch
from torchdefine import DeFINE

APART: tuple[tuple[str, ...], ...] = (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount"), ())
ROOMY = "size=64m"
PAGE = 4 << 10
"""Bytes; disks in memory grow by as much."""


def way_to_mount() -> tuple[str, ...] | None:
    """What to put before a command that mounts; None where nothing helps."""
    with tempfile.TemporaryDirectory() as place:
        for before in APART:
            words = [*before, "sh", "-c", f"mount -t tmpfs -o {ROOMY} drill {place} && umount {place}"]
            with suppress(OSError):
                if not subprocess.run(words, capture_output=True, check=False).returncode:
                    return before
    return None


@contextmanager
def disk(place: Path) -> Iterator[Callable[[str], None]]:
    """A disk in memory at a place; called with other options, it is mounted anew."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ROOMY, "drill", place], check=True)
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", place], check=True) and None
    finally:
        os.environ.pop("TORCHDEFINE_CACHE", None)
        subprocess.run(["umount", "--lazy", place], check=True)


def used(place: Path) -> int:
    return sum(-(-path.stat().st_size // PAGE) * PAGE + PAGE for path in place.rglob("*"))


def drill_full_disks(room: Room, folder: Path, seed: int | str, count: int) -> Watch:
    """Whatever writes meets a disk with little space; with more space it then does what it always does."""
    random_, watch = random.Random(seed), Watch()
    cache = folder / "cache"
    for number in range(count):
        place = folder / f"disk-{number}"
        run, tokens = place / "run", place / "tokens"
        with disk(place) as mount:
            words = random_.choice(_writing(room, run, tokens, place / "export"))
            trains, elsewhere = words[0] == "train", words[0] == "eval"
            os.environ["TORCHDEFINE_CACHE"] = str(place / "texts" if elsewhere else cache)
            if not trains:
                shutil.copytree(room.run, run)
            free = PAGE * random_.randrange(1, 60 if trains else 10)
            mount(f"size={used(place) + free}")
            before = contents(run)
            with watch.case(f"{free >> 10} KiB free, {words[0]}"):
                code, _ = ended_in_a_sentence(watch, [str(word) for word in words], folder)
                if code == 2:
                    watch.fail("the user is blamed")
                after = contents(place)
                if code and not trains and contents(run) != before:
                    watch.fail("refused, but the run changed")
                if code and not trains and any(not name.startswith(("run/", "texts/")) for name in after):
                    watch.fail(f"refused, but {sorted(after)} are there")
                mount(ROOMY)
                if code and trains and (run / "config.yaml").exists():
                    words = ["train", "--out", run, "--resume"]
                if code and (ended_in_a_sentence(watch, [str(word) for word in words], folder)[0]):
                    watch.fail("it fails with more space, too")
                if trains and not same(reached(run), reached(room.run)):
                    watch.fail("the run ended otherwise than it does on a roomy disk")
    return watch


def _writing(room: Room, run: Path, tokens: Path, export: Path) -> list[list[object]]:
    """Commands, with the run in place; training is a third of them."""
    commands: list[list[object]] = [
        ["cache", run],
        ["compress", run, "--method", "int8"],
        ["encode", room.short, "--out", tokens],
        ["eval", run],
        *([["train", room.short, "--out", run]] * 3),
    ]
    return [*commands, *([["export", run, "--format", "torch-export", "--out", export]] if exports() else [])]


def drill_read_only_disks(room: Room, folder: Path, seed: int | str, count: int) -> Watch:
    """What only reads does what it always does; what writes is refused."""
    random_, watch = random.Random(seed), Watch()
    place, cache = folder / "disk", folder / "cache"
    run, killed = place / "run", place / "killed"
    with disk(place) as mount:
        shutil.copytree(room.run, run)
        shutil.copytree(room.run, killed)
        (killed / "result.json").unlink()
        shutil.copytree(room.corpus, place / "corpus")
        DeFINE(50, 8, 4, 8).save(place / "embedding")
        reading: list[list[object]] = [
            ["eval", run],
            ["generate", run, "--length", "5", "--seed", "1"],
            ["compare", run, killed],
            ["params", run / "config.yaml"],
            ["report", run, "--out", folder / "report.html"],
        ]
        os.environ["TORCHDEFINE_CACHE"] = str(cache)
        usual = [ended_in_a_sentence(Watch(), [str(word) for word in words], folder) for words in reading]
        writing: list[list[object]] = [
            *_writing(room, run, place / "tokens", place / "export")[:3],
            ["average", run],
            ["train", "--out", run, "--resume"],
            ["train", "--out", killed, "--resume"],
            ["train", room.short, "--out", place / "new"],
            ["train", room.short, "--out", folder / "cached", "--data", place / "corpus"],
            ["report", run, "--out", place / "report.html"],
        ]
        mount("ro")
        before = contents(place)
        for number in range(count):
            reads, texts_there = random_.random() < 0.4, random_.random() < 0.2
            words = random_.choice(reading if reads else writing)
            os.environ["TORCHDEFINE_CACHE"] = str(place / "texts" if texts_there else cache)
            with watch.case(f"read-only, {words[0]}{', texts there' * texts_there}, {number}"):
                code, out = ended_in_a_sentence(watch, [str(word) for word in words], folder)
                if reads and (code, out) != usual[reading.index(words)] and not (code and texts_there):
                    watch.fail(f"{code}, {out}, and not {usual[reading.index(words)]}")
                if not reads and not code and words[-1] != place / "corpus":
                    watch.fail("what cannot be written was not refused")
            shutil.rmtree(folder / "cached", ignore_errors=True)
        with watch.case("after all that"):
            if contents(place) != before:
                watch.fail("files changed")
    return watch
