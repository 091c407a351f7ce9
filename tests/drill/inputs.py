"""Recipes and command lines that nobody should write, all in one process."""

from __future__ import annotations

import contextlib
import io
import random
from importlib import resources
from pathlib import Path

from tests.drill.watch import Watch
from torchdefine.cli.command_line import run_command
from torchdefine.errors import UserError
from torchdefine.recipe import load_recipe, recipe_names

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
        "~nobody",
        "nowhere/at/all",
        "%s",
        "{}",
        "1,2",
        "500,1.0,0.1",
        "🙂",
        "4 MB",
    ),
)
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


def drill_recipes(room: Path, seed: int, count: int) -> Watch:
    random_, watch = random.Random(seed), Watch("recipes")
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


def drill_commands(run: Path, recipe: Path, corpus: Path, room: Path, seed: int, count: int) -> Watch:
    """``run`` must come out as it went in, beside what cache, compress and average put there."""
    random_, watch = random.Random(seed), Watch("command lines")
    for number in range(count):
        command = random_.choice(list(OPTIONS))
        words = [command, str(run) if command in ON_RUNS else str(recipe) if command != "recipes" else "demo"]
        if random_.random() < 0.15:
            words[1] = random_.choice(ODD_WORDS)
        for _ in range(random_.randrange(1, 3)):
            words += [random_.choice(OPTIONS[command]), random_.choice(ODD_WORDS)]
        if command == "generate":
            words += ["--length", "3"]
        if command in ("train", "encode") and "--out" not in words:
            words += ["--out", str(room / f"out-{number}")]
        if command == "train":
            words += ["--train.steps", "1"]
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with watch.case(f"{command}, {words[1:]!r:.300}"):
            with contextlib.chdir(room), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
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
    return watch
