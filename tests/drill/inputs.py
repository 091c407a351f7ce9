"""Recipes, command lines and paths that nobody should write, all in one process."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tests.drill.mutations import contents
from tests.drill.room import Room
from tests.drill.watch import Watch
from torchdefine import DeFINE, load_run, train
from torchdefine.cli.command_line import run_command
from torchdefine.data import Corpus, encode_corpus
from torchdefine.data.bitext import BitextConfig, encode_bitext
from torchdefine.errors import MachineError, UserError
from torchdefine.export.folder import load_export
from torchdefine.recipe import load_recipe, recipe_names
from torchdefine.tables.compact_table import load_table

ODD_YAML = (
    *("2024-01-01", "12:30:45", "!!float abc", "!!int ''", "!!binary aGk=", "!!python/name:os.system", "&a [*a]", "*a"),
    *("9" * 5000, "1" * 30, "1e999", "-1", "0", ".nan", ".inf", "-.inf", "0x7fffffffffffffffff", "1e400", "~", "''"),
    *(
        '"\\ud800"',
        '"\\0"',
        '"\u2028"',
        "\u2028",
        "\x1b[31m",
        "\t",
        "[" * 400,
        "{a: " * 60,
        "- - - -",
        "? x",
        "%TAG",
        "a: b: c",
    ),
    *(
        "{kind: define, kind: none}",
        "{kind: [1]}",
        "[1, [2, [3]]]",
        "{}",
        "[]",
        "yes",
        "null",
        "!!set {a}",
        "<<: {a: 1}",
    ),
    *("100000000", "2147483648", "1e30", "1_000", "0o17", "１２", "none", "none none", "'", '"', "|", ">", "@", "`"),
)
ODD_WORDS = (
    *(
        "",
        "-1",
        "0",
        "3",
        "1" * 30,
        "9" * 5000,
        "1e300",
        "nan",
        "inf",
        "-inf",
        "0x10",
        "１２",
        "1_000",
        "--",
        "-",
        "-h",
    ),
    *(
        "a\0b",
        "\ud800",
        "\udcff",
        "\x1b[2J",
        "\u202e",
        "[[[[",
        "{a: &a [*a]}",
        "2024-01-01",
        "null",
        "true",
        "none",
        "a" * 5000,
    ),
    *(
        "/dev/null",
        "/dev/zero",
        "/",
        "..",
        "~",
        "~no-such-user",
        "nowhere/at/all",
        "%s",
        "{}",
        "1,2",
        "500,1.0,0.1",
        "🙂",
        "4 MB",
    ),
)
OUTSIDE = ("/", "..", "~")
"""Where a good file could be written."""
OPTIONS = {
    "eval": (
        "--split",
        "--data",
        "--batch-size",
        "--length",
        "--memory",
        "--clamp",
        "--neural-cache",
        "--checkpoint",
        "--device",
    ),
    "generate": ("--prompt", "--temperature", "--top-k", "--top-p", "--seed", "--checkpoint", "--device"),
    "translate": ("--input", "--refs", "--beam", "--length-penalty", "--n-best", "--seed", "--batch-size"),
    "average": ("--last",),
    "compress": ("--method", "--budget", "--codebooks", "--entries", "--seed", "--checkpoint"),
    "cache": ("--dtype", "--checkpoint", "--device"),
    "compare": ("--json", "--jsonn"),
    "export": ("--format", "--out", "--check", "--checkpoint"),
    "params": ("--data", "--embedding.map_dim", "--unit.depth", "--context.layers", "--unit", "--json", "--lr"),
    "recipes": ("--json",),
    "encode": ("--data", "--out", "--data.min_count"),
    "train": (
        "--data",
        "--out",
        "--optim.lr",
        "--train.seed",
        "--train.precision",
        "--embedding.cutoffs",
        "--unit.kind",
    ),
}
ON_RUNS = ("eval", "generate", "translate", "average", "compress", "cache", "compare", "export")


def odd_recipe(random_: random.Random) -> str:
    """A shipped recipe with some of its values, lines or letters in disorder."""
    name = random_.choice(recipe_names())
    lines = (resources.files("torchdefine") / "recipes" / f"{name}.yaml").read_text().splitlines()
    for _ in range(random_.randrange(1, 4)):
        at, way = random_.randrange(len(lines)), random_.randrange(6)
        head, colon, _ = lines[at].partition(":")
        if way < 3 and colon:
            lines[at] = f"{head}: {random_.choice(ODD_YAML)}"
        elif way == 3:
            lines.insert(at, lines[random_.randrange(len(lines))])
        elif way == 4:
            letters = list(lines[at] or " ")
            letters[random_.randrange(len(letters))] = random_.choice("\0\t\x85\u2028:{}[]&*!|>'\"%@`#-?,\x1bé")
            lines[at] = "".join(letters)
        else:
            lines.insert(at, random_.choice(ODD_YAML))
    return "\n".join(lines)


def drill_recipes(room: Path, seed: int | str, count: int) -> Watch:
    random_, watch = random.Random(seed), Watch()
    path = room / "odd.yaml"
    for _ in range(count):
        text = odd_recipe(random_)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        with watch.case(f"a recipe: {text[:300]!r}"):
            try:
                recipe = load_recipe(path)
            except UserError as error:
                watch.refused(str(error))
            else:
                path.write_text(recipe.to_yaml(), encoding="utf-8")
                if load_recipe(path).bound_settings() != recipe.bound_settings():
                    watch.fail("it does not survive its own YAML")
    return watch


def drill_commands(room: Room, folder: Path, seed: int | str, count: int) -> Watch:
    """A run must come out as it went in, beside what cache, compress and average put there."""
    random_, watch = random.Random(seed), Watch()
    run = shutil.copytree(room.run, folder / "run")
    before = contents(run)
    for number in range(count):
        command = random_.choice(list(OPTIONS))
        words = [command, str(run) if command in ON_RUNS else str(room.short) if command != "recipes" else "demo"]
        if random_.random() < 0.15:
            words[1] = random_.choice(ODD_WORDS)
        for _ in range(random_.randrange(1, 3)):
            words += [random_.choice(OPTIONS[command]), random_.choice(ODD_WORDS)]
        if command == "generate":
            words += ["--length", "3"]
        if command in ("train", "encode") and "--out" not in words:
            words += ["--out", str(folder / f"out-{number}")]
        if command == "train":
            words += ["--train.steps", "1"]
        with watch.case(f"{command}, {words[1:]!r:.300}"):
            ended_in_a_sentence(watch, words, folder)
    after = contents(run)
    if any(after.get(name) != content for name, content in before.items()):
        watch.fail("commands changed files of the run")
    return watch


def ended_in_a_sentence(watch: Watch, words: Sequence[str], place: Path) -> tuple[int, str]:
    """The exit code of a command that is called at a place, and what it printed."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(place), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_command(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    said = [line for line in err.getvalue().splitlines() if line.startswith("torchdefine: ")]
    if code:
        watch.refused(said[-1] if said else "")
    if code not in (0, 1, 2) or (code and not said):
        watch.fail(f"ended with {code}: {err.getvalue()[-500:]}")
    if any(sign in out.getvalue() + err.getvalue() for sign in "\x1b\x07\u202e"):
        watch.fail("what a terminal would obey was printed")
    return code, out.getvalue()


def drill_paths(room: Room, folder: Path, seed: int | str, count: int) -> Watch:
    """Odd paths, given to the library."""
    random_, watch, run = random.Random(seed), Watch(), load_run(room.run)
    paths = [word for word in ODD_WORDS if word not in OUTSIDE]
    for number in range(count):
        doors = doors_of_the_library(room, run, folder / f"out-{number}")
        name, path = random_.choice(list(doors)), random_.choice(paths)
        with watch.case(f"{name}, {path!r:.300}"), contextlib.chdir(folder):
            try:
                doors[name](path)
            except (UserError, MachineError) as error:
                watch.refused(str(error))
    return watch


def doors_of_the_library(room: Room, run: Any, out: Path) -> dict[str, Callable[[str], object]]:
    """Whatever takes a path; trainings that can begin go into ``out``."""
    return {
        "load_recipe": load_recipe,
        "load_run": load_run,
        "train, out": lambda path: train(room.short, out=path, train={"steps": 1}),
        "train, data": lambda path: train(room.short, data=path, out=out, train={"steps": 1}),
        "train, tokenizer": lambda path: train(room.short, data={"tokenizer": path}, out=out),
        "train, start_from": lambda path: train(room.short, out=out, train={"steps": 1, "start_from": path}),
        "Corpus.open": Corpus.open,
        "encode_corpus": lambda path: encode_corpus(path, split="test", vocabulary=run.tokenization),
        "encode_corpus, out": lambda path: encode_corpus(room.corpus, out=path),
        "encode_corpus, cache": lambda path: encode_corpus(room.corpus, cache=path),
        "encode_bitext": lambda path: encode_bitext(path, BitextConfig()),
        "DeFINE.load": DeFINE.load,
        "DeFINE.save": DeFINE(50, 8, 4, 8).save,
        "load_table": load_table,
        "load_export": load_export,
        "evaluate": lambda path: run.evaluate(data=path),
    }
