"""Files of a run, changed at random: every use of the run must refuse it, or find the numbers that it had."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.drill.watch import Watch
from torchdefine import load_run, train
from torchdefine.errors import MachineError, UserError
from torchdefine.run import RunFolder

FILES = (
    *("config.yaml", "vocab.txt", "log.jsonl", "result.json"),
    *("best/checkpoint.safetensors", "last/checkpoint.safetensors"),
)


def flip(random_: random.Random, path: Path, _: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    path.write_bytes(content)


def flip_in_the_header(random_: random.Random, path: Path, _: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random_.randrange(min(len(content), 4000))] ^= 1 << random_.randrange(8)
    path.write_bytes(content)


def cut(random_: random.Random, path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[: random_.randrange(path.stat().st_size)])


def blank(random_: random.Random, path: Path, _: Path) -> None:
    content = bytearray(path.read_bytes())
    start, size = random_.randrange(len(content)), random_.randrange(1, 600)
    content[start : start + size] = bytes(len(content[start : start + size]))
    path.write_bytes(content)


def repeat(random_: random.Random, path: Path, _: Path) -> None:
    content = path.read_bytes()
    start = random_.randrange(len(content))
    path.write_bytes(content[:start] + content[start : start + random_.randrange(1, 200)] + content[start:])


def other_number(random_: random.Random, path: Path, _: Path) -> None:
    """One digit, where a number stands."""
    content = bytearray(path.read_bytes()[:6000])
    digits = [at for at, byte in enumerate(content) if 0x30 <= byte <= 0x39]
    at = random_.choice(digits)
    content[at] = 0x30 + (content[at] - 0x30 + random_.randrange(1, 10)) % 10
    path.write_bytes(content + path.read_bytes()[6000:])


def odd_value(random_: random.Random, path: Path, _: Path) -> None:
    """Something of another type, very deep or very long, in the place of a number."""
    odd = (
        "[" * 3000,
        "9" * 5000,
        '"text"',
        "null",
        "{}",
        "-1",
        "1e999",
        "NaN",
        "\ud83d\ude00".encode("utf-16", "surrogatepass").hex(),
    )
    content = path.read_bytes()
    digits = [at for at, byte in enumerate(content[:6000]) if 0x30 <= byte <= 0x39]
    at = random_.choice(digits)
    path.write_bytes(content[:at] + random_.choice(odd).encode() + content[at + 1 :])


def anothers(_: random.Random, path: Path, other: Path) -> None:
    shutil.copy(other, path)


def folder(_: random.Random, path: Path, __: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(_: random.Random, path: Path, __: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(_: random.Random, path: Path, __: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def gone(_: random.Random, path: Path, __: Path) -> None:
    path.unlink()


def empty(_: random.Random, path: Path, __: Path) -> None:
    path.write_bytes(b"")


KINDS: tuple[Callable[[random.Random, Path, Path], None], ...] = (
    *(flip, flip, flip_in_the_header, cut, blank, repeat, other_number, odd_value),
    *(anothers, folder, pipe, endless, gone, empty),
)


def numbers(run: Path, checkpoint: str) -> Any:
    return load_run(run, checkpoint=checkpoint).evaluate("test").perplexity


def without_finished_parts(run: Path) -> Any:
    """What a resumed run comes to, its times aside."""
    if (run / "result.json").is_file():
        (run / "result.json").unlink()
    result = train(out=run, resume=True).result
    return {name: result[name] for name in ("steps", "tokens", "best_step", "test_perplexity", "valid_perplexity")}


USES: dict[str, Callable[[Path], Any]] = {
    "eval of the best weights": lambda run: numbers(run, "best"),
    "eval of the last weights": lambda run: numbers(run, "last"),
    "its result": lambda run: RunFolder(run).read_result(),
    "its log": lambda run: RunFolder(run).records(),
    "training that goes on": lambda run: without_finished_parts(run),
}


def contents(run: Path) -> dict[str, bytes]:
    found = (path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def drill_mutations(one: Path, other: Path, room: Path, seed: int | str, count: int) -> Watch:
    """``one`` and ``other`` are finished runs of the same recipe; nothing of them is changed."""
    random_, watch = random.Random(seed), Watch()
    wanted = {}
    for name, use in USES.items():
        shutil.copytree(one, room / "whole")
        wanted[name] = use(room / "whole")
        shutil.rmtree(room / "whole")
    for number in range(count):
        file, kind = random_.choice(FILES), random_.choice(KINDS)
        name = random_.choice(list(USES))
        run = shutil.copytree(one, room / f"mutated-{number}")
        kind(random_, run / file, other / file)
        before = contents(run)
        with watch.case(f"{kind.__name__} of {file}, then {name}"):
            try:
                found = USES[name](run)
            except (UserError, MachineError) as error:
                watch.refused(str(error))
                changed = {n for n, content in contents(run).items() if before.get(n, content) != content}
                # Training that goes on may be refused only at its end, by a part that it does not need before.
                if changed and name != "training that goes on":
                    watch.fail(f"refused, but {sorted(changed)} changed")
            else:
                as_before = found == wanted[name] or (name == "its log" and all(line in wanted[name] for line in found))
                if not as_before:
                    watch.fail("another result")
        shutil.rmtree(run)
    return watch
