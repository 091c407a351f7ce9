"""Commands that read texts and train on them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.cli.shared import Command, add_shared, bar, data_settings, show, whole
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from torchdefine.run import Run
    from torchdefine.task import Section

TRAINING = """  torchdefine train demo/adaptive-define --out runs/first
  torchdefine train demo/adaptive-define --data my_texts/ --out runs/second --optim.lr 3e-3 --train.steps 2000
  torchdefine train mine.yaml --out runs/third           a recipe of your own
  torchdefine train --out runs/third --resume            continue an interrupted run"""

ENCODING = """  torchdefine encode table1a/r3 --data my_texts/ --out my_tokens/
  torchdefine train table1a/r3 --data my_tokens/           on this machine or another one

  Training encodes a text once and caches the tokens. Use this command to encode a large text in advance, before you
  rent an expensive machine. The folder my_tokens/ holds the tokens and their vocabulary. It replaces the text for every
  recipe with the same data settings."""

SEARCHING = """example:
  torchdefine search demo/adaptive-projection --out runs/search --train.steps 450

  Candidates differ in their unit, features, tied weights and learning rate. The budget decides the width of the table.
  After a ninth of the steps only the best third continues, and again after a third of the steps."""

SETTINGS = """settings:
  --SECTION.NAME VALUE changes any setting of the recipe, as in --optim.lr 1e-3. --SECTION KIND changes the kind of a
  part, as in --unit define; the other settings of the part are then the defaults of that kind.
  The default is in [brackets]. `torchdefine recipes NAME` shows the values of a recipe."""


def add_commands(command: Command) -> None:
    """The commands that read texts and train."""
    text = "a folder with train, valid and test text, or a named corpus"
    option = command("train", _train, "Train a recipe on a text.", TRAINING, settings_help)
    option("recipe", nargs="?", help="a recipe's name, or a YAML file; not needed with --resume")
    option("--data", help=f"{text}, or a folder that `encode` wrote")
    option("--out", help="the run's folder (default: a new one under runs/)")
    option("--resume", action="store_true", help="continue the run in --out")
    option("--tensorboard", action="store_true", help="also write TensorBoard logs into the run's folder")
    add_shared(option, "--device", "--json")

    option = command(
        "encode", _encode, "Encode a text in advance, into a folder that you can move to another machine.", ENCODING
    )
    option("recipe", help="the recipe that you will train: a name, or a YAML file; its data settings are used")
    option("--data", help=text)
    option("--out", required=True, help="a new folder for the tokens")

    summary = "Search for the best table and unit by short runs, at equal parameters or equal time per step."
    option = command("search", _search, summary, SEARCHING)
    option("recipe", help="the recipe that candidates start from: a name, or a YAML file")
    option("--data", help=text)
    option("--out", required=True, help="the search's folder; an existing search is continued")
    option("--trials", type=whole, default=24, help="number of candidates (default: 24)")
    option(
        "--equal",
        default="parameters",
        choices=["parameters", "time"],
        help="what is equal to that of the recipe (default: parameters)",
    )
    add_shared(option, "--device")

    summary = "Train five small language models, pack the table of the best one, and compare them: a few minutes."
    option = command("demo", _demo, summary)
    option("--out", default="runs/demo", help="where the runs and the report go (default: runs/demo)")


def settings_help() -> str:
    """Every setting that a command line may change: those of the first task, and what differs for the others."""
    from torchdefine.task import find_task, task_names

    lines = [SETTINGS]
    shown: dict[str, list[str]] = {}
    for name in task_names():
        lines += ["", f"Settings of the task {name}{' that the tasks above do not have' if shown else ''}:"]
        for section, of in find_task(name).recipe.sections().items():
            rows = list(_rows(section, of))
            new = [row for row in rows if row not in shown.get(section, [])]
            if any(row.startswith("  --") for row in new):
                lines += ["", f"{section}:", *new]
            shown.setdefault(section, rows)
    return "\n".join(lines)


def _rows(section: str, of: Section) -> Iterator[str]:
    """The settings of a part: first what all its kinds have, then the rest of each; equal kinds stand together."""
    from torchdefine.config import Kinds, explain

    def row(name: str, explanation: str, default: str) -> str:
        return f"  --{f'{section}.{name}':<28} {explanation} [{default}]"

    kinds_of: dict[Any, list[str]] = {}
    if isinstance(of, Kinds):
        yield row("kind", f"Kind of {of.part}: {', '.join(of)}.", of.default)
        for kind in of:
            kinds_of.setdefault(of.config(kind), []).append(kind)
    else:
        kinds_of[of] = [section]
    explained = {", ".join(kinds): [row(*one) for one in explain(config)] for config, kinds in kinds_of.items()}
    common = [one for one in next(iter(explained.values())) if all(one in rows for rows in explained.values())]
    yield from common
    for kinds, rows in explained.items():
        if rest := [one for one in rows if one not in common]:
            yield from (f"  {kinds}:", *rest)


def _train(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.run import train
    from torchdefine.run.result import shortfall
    from torchdefine.training.progress import Reporter, TensorBoardReporter, default_reporter

    data = data_settings(options, overrides.pop("data", {}))
    reporter: Reporter = default_reporter()
    if options.tensorboard:
        if not options.out:
            raise UserError("TensorBoard logs go into the run's folder: name it with --out.")
        reporter = TensorBoardReporter(reporter, str(Path(options.out) / "tensorboard"))
    how = {name: getattr(options, name) for name in ("out", "resume", "device")}
    with bar("reading the text") as progress:
        run = train(options.recipe, data=data, reporter=reporter, progress=progress, **how, **overrides)
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process speaks for all
        return
    trouble = shortfall(run.result)
    if options.json and trouble:
        print(trouble, file=sys.stderr)
    show(options, run.result, filter(None, [*_what_it_reached(run), trouble]))


def _what_it_reached(run: Run) -> Iterator[str]:
    """The numbers of a run that has just ended, with what a reader must know about them."""
    from torchdefine.run.result import best_before_the_end
    from torchdefine.task import find_task
    from torchdefine.training.progress import shown_perplexity

    task, result, folder = find_task(run.recipe.task), run.result, shlex.quote(str(run.folder.path))
    yield from task.headline(result)
    for split in ("valid", "test"):
        if f"{split}_perplexity" in result:
            unigram = result.get(f"{split}_unigram_perplexity")
            beside = f" (unigram {unigram:,.1f})" if unigram else ""
            yield f"{split} perplexity {shown_perplexity(result[f'{split}_perplexity'])}{beside}"
    yield best_before_the_end(result)
    if not result["evaluation"]:
        yield (
            "Nothing was measured, because there is neither a valid nor a test text: add one to the folder of the "
            f"text, or measure the run on another text with `torchdefine eval {folder} --data {task.measured_on}`."
        )
    yield from task.caveats(result, run.recipe, folder).values()
    yield f"The run is in {run.folder.path}."


def _encode(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.run.starting import wanted_recipe
    from torchdefine.task import find_task

    data = data_settings(options, overrides.pop("data", {}))
    recipe, _ = wanted_recipe(options.recipe, data, overrides)
    task = find_task(recipe.task)
    with bar("reading the text") as progress:
        texts = task.encode(recipe, options.out, progress)
    for sentence in task.about_data(recipe, texts):
        print(sentence)
    amounts = ", ".join(f"{split} {len(file):,}" for split, file in texts.splits.items())
    size = sum(path.stat().st_size for path in texts.folder.iterdir()) / 1e6
    print(f"The tokens ({amounts}; {size:,.1f} MB) are in {texts.folder}: pass it as --data instead of the text.")


def _search(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.search import PICTURE, REPORT, search

    data = data_settings(options, overrides.pop("data", {}))
    how = {name: getattr(options, name) for name in ("trials", "equal", "device")}
    search(options.recipe, options.out, data=data, tell=partial(print, flush=True), **how, **overrides)
    print((Path(options.out) / REPORT).read_text(encoding="utf-8"))
    print(f"The report is {Path(options.out) / REPORT}, its picture {PICTURE}.")


def _demo(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.demo import run_demo

    run_demo(Path(options.out))
