"""Train the models of a family of token_functions.yaml, one after another, and keep a JSON of each.

    python results/run_token_functions.py FAMILY … [--data FOLDER] [--device cpu] [--shared] [--times]

A run that has its JSON is not done again, and one that another process does is left to it. Beside the usual evaluation
the perplexity of test tokens that follow a rare word is measured. `make results` turns the files into tables.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout

from torchdefine import Run, train
from torchdefine.data import IGNORE, TokenStreams
from torchdefine.files import write_json
from torchdefine.modes import reading
from torchdefine.recipe import load_recipe, merged
from torchdefine.run.environment import describe_environment
from torchdefine.search import step_times
from torchdefine.tasks.language.task import open_corpus
from torchdefine.training.distributed import Processes
from torchdefine.training.progress import LineReporter

HERE = Path(__file__).parent
RARE = 10
"""How often a rare word stands in the training text, at most."""


class Planned(NamedTuple):
    """A row of a family with one seed."""

    family: str
    row: str
    recipe: str
    changes: dict[str, Any]

    @property
    def file(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", self.row.lower()).strip("-")
        return f"{plain}-seed-{self.changes['train']['seed']}.json"


def runs_of(name: str) -> Iterator[Planned]:
    """The runs of a family, first seeds before second ones."""
    families = {family["name"]: family for family in yaml.safe_load((HERE / "token_functions.yaml").read_text())}
    family = families[name]
    for place in range(2):
        for row in family["rows"]:
            seeds = row.get("seeds", family["seeds"])
            for rate in family.get("rates", [None]) if place < len(seeds) else ():
                own = {section: value for section, value in row.items() if isinstance(value, dict)}
                changes = merged(merged(family["common"], own), {"train": {"seed": seeds[place]}})
                label = row["name"] if rate is None else f"{row['name']}, rate {rate:g}"
                changes = changes if rate is None else merged(changes, {"optim": {"lr": rate}})
                yield Planned(name, label, row.get("recipe", family["recipe"]), changes)


@torch.no_grad()
def after_rare_words(run: Run, split: str = "test") -> dict[str, float] | None:
    """Loss and perplexity of tokens whose previous token is rare in the training text; None if there are none."""
    corpus, own, device = open_corpus(run.recipe.data), run.recipe.eval, next(run.model.parameters()).device
    counts = torch.as_tensor(np.asarray(run.token_counts()), device=device)
    tokens = np.asarray(corpus.splits[split].tokens)
    streams = TokenStreams(tokens, own.batch_size, device, corpus.tokenization.eos_id, pad=True)
    nats, number = torch.zeros((), dtype=torch.float64, device=device), 0
    with reading(run.model) as model:
        state = model.initial_state(own.batch_size)
        for start in range(0, streams.length, own.length):
            ids, targets = streams.segment(start, own.length)
            losses, state = model(ids, targets, state, reduction="none")
            wanted = (counts[ids] <= RARE) & (targets != IGNORE)
            nats += losses.cross_entropy[wanted].double().sum()
            number += int(wanted.sum())
    if not number:
        return None
    loss = float(nats) / number
    return {"at_most": RARE, "tokens": number, "loss": loss, "perplexity": math.exp(loss)}


def write_result(planned: Planned, path: Path, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = {} if options.data is None else {"data": {"corpus": options.data}}
        reporter, out = LineReporter(seconds_between=30), Path(folder) / "run"
        run = train(planned.recipe, out=out, device=options.device, reporter=reporter, **merged(planned.changes, given))
        place = {"family": planned.family, "row": planned.row, "shared_device": options.shared}
        write_json(path, {**run.result, **place, "after_rare_words": after_rare_words(run)})


def write_times(family: str, path: Path, options: argparse.Namespace) -> None:
    """How long a training step of every row of a family takes, measured in turns."""
    given = {} if options.data is None else {"data": {"corpus": options.data}}
    rows = {one.row: one for one in runs_of(family)}
    recipes = [load_recipe(one.recipe, merged(one.changes, given)) for one in rows.values()]
    device = Processes().device(options.device)
    times = step_times(recipes, open_corpus(recipes[0].data), device)
    facts = {"family": family, "ms_per_step": dict(zip(rows, times, strict=True)), "shared_device": options.shared}
    write_json(path, {**facts, **describe_environment(device)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", metavar="FAMILY")
    parser.add_argument("--data", help="a folder with the text; the recipe's by default")
    parser.add_argument("--device")
    parser.add_argument("--shared", action="store_true", help="other work runs meanwhile, so speed tells nothing")
    parser.add_argument("--times", action="store_true", help="only time the steps of all rows, in turns")
    parser.add_argument("--out", type=Path, default=HERE / "token-functions")
    options = parser.parse_args()
    if options.times:
        for family in options.families:
            write_times(family, options.out / "times" / f"{family}.json", options)
        return
    for planned in [planned for family in options.families for planned in runs_of(family)]:
        path = options.out.resolve() / planned.family / planned.file
        lock = FileLock(
            Path(tempfile.gettempdir(), f"torchdefine-{planned.family}-{planned.file}.lock"), blocking=False
        )
        with suppress(Timeout), lock:
            if not path.exists():
                print(f"{planned.family}, {planned.row}:", flush=True)
                write_result(planned, path, options)


if __name__ == "__main__":
    main()
