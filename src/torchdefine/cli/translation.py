"""Commands that translate."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from torchdefine.cli.shared import Command, add_json, add_loading, add_run, loading, print_json, refuse_idle
from torchdefine.errors import UserError

OF_THE_BEAM = {
    "beam": "size",
    "length_penalty": "length_penalty",
    "max_ratio": "max_ratio",
    "max_extra": "max_extra",
    "batch_size": "batch_size",
}
"""Settings of the search by the options that change them."""


def add_commands(command: Command) -> None:
    """The commands for translators."""
    sub = command("translate", _translate, "Translate text line by line; as many lines come out as go in.")
    add_run(sub)
    sub.add_argument("--input", help="the text to translate, plain or packed (default: standard input)")
    sub.add_argument("--refs", help="true translations, line by line; BLEU and chrF go to standard error")
    sub.add_argument("--beam", type=int, help="hypotheses that the search keeps; 1 is greedy (default: the recipe's)")
    sub.add_argument("--length-penalty", type=float, help="exponent of Wu's length penalty (default: the recipe's)")
    sub.add_argument(
        "--max-ratio",
        type=float,
        help="a translation has at most this many tokens for each of the source's … (default: the recipe's)",
    )
    sub.add_argument("--max-extra", type=int, help="… and this many more (default: the recipe's)")
    sub.add_argument("--n-best", type=int, default=1, help="translations of each line, with tabs between (default: 1)")
    sub.add_argument("--sample", action="store_true", help="draw translations instead of searching for the best")
    sub.add_argument("--temperature", type=float, help="of --sample: below 1 is more cautious (default: 1)")
    sub.add_argument("--top-k", type=int, help="of --sample: among the k most probable tokens only")
    sub.add_argument(
        "--top-p", type=float, help="of --sample: among the most probable tokens of this probability together"
    )
    sub.add_argument("--seed", type=int, help="of --sample (default: 1)")
    sub.add_argument(
        "--batch-size", type=int, help="sentences at once; changes speed, not the result (default: the recipe's)"
    )
    add_loading(sub)
    sub.add_argument("--json", action="store_true", help="print JSON, with log-probabilities and scores")

    sub = command("average", _average, "Average the weights that a run has kept (--train.keep) into one checkpoint.")
    add_run(sub)
    sub.add_argument("--last", type=int, help="how many of the latest ones (default: all)")
    add_json(sub)


def _translate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import RunFolder, load_run
    from torchdefine.run.run import check_can
    from torchdefine.task import find_task
    from torchdefine.training.progress import work_bar

    folder = RunFolder(options.folder)
    recipe = folder.recipe()
    check_can(recipe, "translate", folder)
    task = find_task(recipe.task)
    how = task.run.options(recipe, **_ways_to_translate(options))  # type: ignore[attr-defined]
    if options.refs:
        task.check_packages()
    run = load_run(options.folder, **loading(options))  # before waiting for standard input
    lines, references = _texts(options)
    started = time.monotonic()
    with work_bar("translating") as progress:
        found = run.translate(lines, how, progress=progress, on_long_line=_tell_of_long_line)
    seconds = max(time.monotonic() - started, 1e-9)
    scores = run.score([best[0].text for best in found], references) if references else None
    if options.json:
        shown = [[dataclasses.asdict(translation) for translation in best] for best in found]
        scored = {} if scores is None else dataclasses.asdict(scores)
        print_json({"translations": shown, "sentences_per_second": round(len(found) / seconds, 2), **scored})
        return
    sys.stdout.flush()
    sys.stdout.buffer.write("".join("\t".join(t.text for t in best) + "\n" for best in found).encode())
    sys.stdout.buffer.flush()
    if scores is not None:
        print("\n".join(scores.lines()), file=sys.stderr)


def _ways_to_translate(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line changes of the recipe's search."""
    from torchdefine.tasks.sampling import SamplingOptions

    if options.sample:
        refuse_idle(options, ("beam",), "to --sample")
    else:
        refuse_idle(options, ("temperature", "top_k", "top_p", "seed"), "without --sample")
    if options.temperature == 0:
        refuse_idle(options, ("top_k", "top_p"), "at a temperature of 0")
    given = {name: value for option, name in OF_THE_BEAM.items() if (value := getattr(options, option)) is not None}
    temperature = 1.0 if options.temperature is None else options.temperature
    sampling = SamplingOptions(temperature, options.top_k, options.top_p) if options.sample else None
    seed = 1 if options.seed is None else options.seed
    return {**given, "sampling": sampling, "seed": seed, "n_best": options.n_best}


def _texts(options: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """The lines to translate, and their true translations where these were given."""
    from torchdefine.data.text_files import decode_text

    lines = _lines_of(options.input) if options.input else decode_text(sys.stdin.buffer.read(), "The standard input")
    if not lines:
        print("There is no line to translate.", file=sys.stderr)
    if not options.refs:
        return lines, None
    references = _lines_of(options.refs)
    if len(references) != len(lines):
        raise UserError(f"{options.refs} has {len(references):,} lines, but {len(lines):,} are to be translated.")
    return lines, references


def _lines_of(path: str) -> list[str]:
    from torchdefine.data.text_files import read_text

    return [line for block in read_text(Path(path), may_be_empty=True) for line in block.lines]


def _tell_of_long_line(number: int, tokens: int, pieces: int) -> None:
    print(f"Line {number:,} has {tokens:,} tokens and was translated in {pieces} pieces.", file=sys.stderr)


def _average(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import average_run

    folder, steps = average_run(options.folder, options.last)
    if options.json:
        print_json({"run": str(options.folder), "averaged_steps": steps, "checkpoint": str(folder.average)})
    else:
        listed = ", ".join(f"{step:,}" for step in steps)
        print(f"The mean of the weights of the steps {listed} is in {folder.average}: use it by --checkpoint average.")
