"""Commands that read texts and train on them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.cli.shared import Command, add_device, data_settings, print_json
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from torchdefine.config import Kinds
    from torchdefine.run import Run
    from torchdefine.task import Section

TRAINING = """  torchdefine train demo/adaptive-define --out runs/first
  torchdefine train demo/adaptive-define --data my_texts/ --out runs/second --optim.lr 3e-3 --train.steps 2000
  torchdefine train mine.yaml --out runs/third           a recipe of your own
  torchdefine train --out runs/third --resume            go on where it was interrupted"""

ENCODING = """  torchdefine encode table1a/r3 --data my_texts/ --out my_tokens/
  torchdefine train table1a/r3 --data my_tokens/           here, or on a machine that the folder was taken to

  The words of a text are counted and numbered once, by the data settings of a recipe, and kept in a cache. For a large
  text and a machine whose time is expensive, this does it beforehand: my_tokens/ has the tokens and their vocabulary,
  and takes the place of the text for every recipe with the same data settings."""

SETTINGS = """settings:
  Any setting of the recipe can be changed by --SECTION.NAME VALUE, as in --optim.lr 1e-3, and the kind of a part by
  --SECTION KIND, as in --unit define; another kind starts with its own defaults.
  […] is the value where the recipe sets none; `torchdefine recipes NAME` shows a recipe's own."""


def add_commands(command: Command) -> None:
    """The commands that read texts and train."""
    sub = command("train", _train, "Train a recipe on a text.", TRAINING, settings_help)
    sub.add_argument(
        "recipe",
        nargs="?",
        help="a recipe's name, or a YAML file; with --resume not needed: the run has its own",
    )
    sub.add_argument(
        "--data", help="a folder with train, valid and test text, one that `encode` wrote, or a named corpus"
    )
    sub.add_argument("--out", help="the run's folder (default: a new one under runs/)")
    sub.add_argument("--resume", action="store_true", help="go on with the run in --out")
    add_device(sub)
    sub.add_argument("--tensorboard", action="store_true", help="write TensorBoard logs into the run's folder too")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")

    sub = command("encode", _encode, "Turn a text into tokens beforehand, in a folder that can be moved.", ENCODING)
    sub.add_argument("recipe", help="the recipe that will be trained, for its data settings: a name, or a YAML file")
    sub.add_argument("--data", help="a folder with train, valid and test text, or a named corpus")
    sub.add_argument("--out", required=True, help="a new folder for the tokens")

    sub = command(
        "demo", _demo, "Train five small language models on the shipped text and compare them: a few minutes."
    )
    sub.add_argument("--out", default="runs/demo", help="where the runs and the report go (default: runs/demo)")


def settings_help() -> str:
    """Every setting that a command line may change: those of the first task, and what differs for the others."""
    from torchdefine.task import find_task, task_names

    lines = [SETTINGS]
    shown: dict[str, list[str]] = {}
    for name in task_names():
        sections = {section: list(_section(section, of)) for section, of in find_task(name).recipe.sections().items()}
        lines += ["", f"Settings of the task {name}{' that others have not' if shown else ''}:"]
        for section, rows in sections.items():
            new = [row for row in rows if row not in shown.get(section, [])]
            if any(row.startswith("  --") for row in new):
                lines += ["", f"{section}:", *new]
        shown = {**sections, **shown}
    return "\n".join(lines)


def _section(section: str, of: Section) -> Iterator[str]:
    from torchdefine.config import Kinds, explain

    if isinstance(of, Kinds):
        yield from _kinds(section, of)
    else:
        yield from _rows(section, explain(of))


def _kinds(section: str, of: Kinds) -> Iterator[str]:
    """What all kinds have, then the rest of each; kinds with the same settings stand together."""
    from torchdefine.config import explain

    by_config: dict[Any, list[str]] = {}
    for kind in of:
        by_config.setdefault(of.config(kind), []).append(kind)
    own = {", ".join(kinds): explain(config) for config, kinds in by_config.items()}
    common = [row for row in next(iter(own.values())) if all(row in rows for rows in own.values())]
    yield f"  --{f'{section}.kind':<28} Which {of.part}: {', '.join(of)}. [{of.default}]"
    yield from _rows(section, common)
    for kinds, rows in own.items():
        if rest := [row for row in rows if row not in common]:
            yield f"  {kinds}:"
            yield from _rows(section, rest)


def _rows(section: str, explained: Iterable[Any]) -> Iterator[str]:
    return (f"  --{f'{section}.{one.name}':<28} {one.explanation} [{one.default}]" for one in explained)


def _train(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.run import train
    from torchdefine.run.result import shortfall
    from torchdefine.training.progress import TensorBoardReporter, default_reporter, work_bar

    data = data_settings(options, overrides.pop("data", {}))
    reporter: Any = default_reporter()
    if options.tensorboard:
        if not options.out:
            raise UserError("TensorBoard logs go into the run's folder: name it with --out.")
        reporter = TensorBoardReporter(reporter, str(Path(options.out) / "tensorboard"))
    with work_bar("reading the text") as progress:
        run = train(
            options.recipe,
            data=data,
            out=options.out,
            resume=options.resume,
            device=options.device,
            reporter=reporter,
            progress=progress,
            **overrides,
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process speaks for all
        return
    trouble = shortfall(run.result)
    if options.json:
        print_json(run.result)
        if trouble:
            print(trouble, file=sys.stderr)
        return
    print("\n".join([*_what_it_reached(run), *([trouble] if trouble else [])]))


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
    if earlier := best_before_the_end(result):
        yield earlier
    if not result["evaluation"]:
        yield (
            "Nothing was measured, for there is neither a valid nor a test text: add one to the folder of the text, or "
            f"measure another by `torchdefine eval {folder} --data {task.measured_on}`."
        )
    yield from task.caveats(result, run.recipe, folder).values()
    yield f"The run is in {run.folder.path}."


def _encode(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.run.starting import wanted_recipe
    from torchdefine.task import find_task
    from torchdefine.training.progress import work_bar

    data = data_settings(options, overrides.pop("data", {}))
    recipe, _ = wanted_recipe(options.recipe, data, overrides)
    task = find_task(recipe.task)
    with work_bar("reading the text") as progress:
        texts = task.encode(recipe, options.out, progress)
    for sentence in task.about_data(recipe, texts):
        print(sentence)
    amounts = ", ".join(f"{split} {len(file):,}" for split, file in texts.splits.items())
    size = sum(path.stat().st_size for path in texts.folder.iterdir()) / 1e6
    print(f"The tokens ({amounts}; {size:,.1f} MB) are in {texts.folder}: name it as --data in the place of the text.")


def _demo(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.demo import run_demo

    run_demo(Path(options.out))
