"""The long form: ``make drill`` or ``python -m tests.drill --seeds 1 2 3 --write``.

A seed that nobody has chosen is drawn at the end. ``--write`` puts the counts into docs/safety.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.drill.artefacts import drill_artefacts
from tests.drill.inputs import drill_commands, drill_recipes
from tests.drill.mutations import contents, drill_mutations
from tests.drill.processes import drill_kills, drill_limits
from tests.drill.watch import Watch
from torchdefine import train

PAGE = Path(__file__).parents[2] / "docs" / "safety.md"
HEADER = ["what was tried", "cases", "refused", "failures", "longest", "most memory"]
RECIPE = """data: {{corpus: {corpus}}}
embedding: {{kind: adaptive, map_dim: 16, cutoffs: [10, 30], division: 2, row_dropout: 0.1}}
unit: {{kind: define, expand_dim: 32, depth: 3, dropout: 0.1}}
context: {{layers: 2, hidden_dim: 24, input_dropout: 0.2, hidden_dropout: 0.2}}
output: {{kind: adaptive}}
optim: {{kind: adam, lr: 5.0e-3, clip: 1.0}}
train: {{batch_size: 4, length: 10, steps: {steps}, log_every: 5, eval_every: 20, checkpoint_every: 10, keep: 2}}
eval: {{batch_size: 2, length: 16}}
"""


def make_room(room: Path) -> None:
    """A small text, a short recipe with two runs of it, and a longer one to be killed."""
    random_, corpus = random.Random(0), room / "corpus"
    corpus.mkdir()
    for split, lines in (("train", 400), ("valid", 60), ("test", 60)):
        rows = (" ".join(f"w{int(60 * random_.random() ** 3)}" for _ in range(8)) for _ in range(lines))
        (corpus / f"{split}.txt").write_text("\n".join(rows) + "\n")
    for name, steps in (("tiny", 20), ("longer", 300)):
        (room / f"{name}.yaml").write_text(RECIPE.format(corpus=corpus, steps=steps))
    for name, recipe in (("one", "tiny"), ("other", "tiny"), ("whole", "longer")):
        train(room / f"{recipe}.yaml", out=room / name)


def drill(room: Path, seed: int, options: argparse.Namespace) -> list[Watch]:
    corpus, tiny, longer = room / "corpus", room / "tiny.yaml", room / "longer.yaml"

    def fresh() -> Path:
        return Path(tempfile.mkdtemp(dir=room))

    used = shutil.copytree(room / "one", fresh() / "run")
    before = contents(used)
    found = [
        drill_mutations(room / "one", room / "other", fresh(), seed, options.mutations),
        drill_artefacts(room / "one", corpus, fresh(), seed, options.mutations // 3),
        drill_recipes(fresh(), seed, options.inputs * 7 // 10),
        drill_commands(used, tiny, corpus, fresh(), seed, options.inputs * 3 // 10),
        drill_kills(longer, room / "whole", corpus, fresh(), seed, options.kills),
        drill_limits(shutil.copytree(room / "one", fresh() / "run"), tiny, fresh(), seed, options.limits),
    ]
    if any(contents(used).get(name) != content for name, content in before.items()):
        found[3].fail("commands changed files of the run")
    return found


def table(watches: dict[int, list[Watch]]) -> str:
    rows = [[str(seed), *watch.row()] for seed, of_seed in watches.items() for watch in of_seed]
    every = [watch for of_seed in watches.values() for watch in of_seed]
    total = Watch("all")
    total.cases, total.refusals = (sum(getattr(watch, name) for watch in every) for name in ("cases", "refusals"))
    total.failures = [failure for watch in every for failure in watch.failures]
    total.slowest, total.largest = (max(getattr(watch, name) for watch in every) for name in ("slowest", "largest"))
    lines = [["seed", *HEADER], ["---"] * (len(HEADER) + 1), *rows, ["all", *total.row()]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--mutations", type=int, default=300)
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--limits", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="put the table into docs/safety.md")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    watches: dict[int, list[Watch]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHDEFINE_CACHE"] = str(Path(folder) / "cache")
        make_room(Path(folder))
        for seed in (*options.seeds, random.SystemRandom().randrange(1 << 32)):
            began = time.monotonic()
            watches[seed] = drill(Path(folder), seed, options)
            print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
            for failure in (failure for watch in watches[seed] for failure in watch.failures):
                print(failure, file=sys.stderr, flush=True)
    written = table(watches)
    print(written)
    if options.write:
        page, between = PAGE.read_text(encoding="utf-8"), "<!-- counts -->\n{}<!-- end -->"
        old = re.compile(between.format(".*?"), re.DOTALL)
        PAGE.write_text(old.sub(lambda _: between.format(f"{written}\n"), page), encoding="utf-8")
    sys.exit(any(watch.failures for of_seed in watches.values() for watch in of_seed))


if __name__ == "__main__":
    main()
