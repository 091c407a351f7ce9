"""Commands that use a run."""

from __future__ import annotations

import argparse
import sys
from inspect import signature
from typing import Any

from torchdefine.cli.shared import Command, add_json, add_loading, add_run, loading, print_json, refuse_idle
from torchdefine.errors import UserError

MEASURING = ("batch_size", "length", "memory", "clamp", "neural_cache", "tune_cache")
"""Options of eval that the runs of some tasks take."""


def add_commands(command: Command) -> None:
    """The commands that use a run."""
    sub = command("eval", _eval, "Measure a run's perplexity on a text; a translator's BLEU and chrF too.")
    add_run(sub)
    sub.add_argument("--split", default="test", help="train, valid or test (default: test)")
    sub.add_argument("--data", help="another text than the run's own: a folder, a text file, or a named corpus")
    sub.add_argument("--batch-size", type=int, help="streams the text is cut into; 1 is exact (default: the recipe's)")
    sub.add_argument("--length", type=int, help="tokens a step (default: the recipe's)")
    sub.add_argument("--memory", type=int, help="positions that a Transformer-XL remembers (default: the recipe's)")
    sub.add_argument(
        "--clamp", type=int, help="the largest distance that a Transformer-XL tells apart (default: the recipe's)"
    )
    sub.add_argument(
        "--neural-cache", metavar="WINDOW,THETA,WEIGHT", help="look back at the text itself, as in 500,1.0,0.1"
    )
    sub.add_argument(
        "--tune-cache",
        action="store_true",
        default=None,
        help="choose the three numbers of --neural-cache on the validation text first",
    )
    add_loading(sub)
    add_json(sub)

    sub = command("generate", _generate, "Let a run continue a text.")
    add_run(sub)
    sub.add_argument(
        "--prompt",
        default="",
        help="the text to continue, words as in the training text (default: none, a text begins)",
    )
    sub.add_argument("--length", type=int, default=100, help="tokens to draw (default: 100)")
    sub.add_argument("--temperature", type=float, default=0.8, help="below 1 is more cautious, 0 greedy (default: 0.8)")
    sub.add_argument("--top-k", type=int, help="draw among the k most probable tokens only")
    sub.add_argument("--top-p", type=float, help="draw among the most probable tokens of this probability together")
    sub.add_argument(
        "--seed", type=int, help="any number, for the same text every time (default: another text each time)"
    )
    add_loading(sub)
    add_json(sub)


def _eval(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import RunFolder, load_run
    from torchdefine.task import find_task
    from torchdefine.training.progress import work_bar

    folder = RunFolder(options.folder)
    task = find_task(folder.recipe().task)
    given = {name: value for name in MEASURING if (value := getattr(options, name)) is not None}
    taken = signature(task.run.measure).parameters  # type: ignore[attr-defined]
    refuse_idle(options, [name for name in given if name not in taken], f"to a model for {task.name}")
    if {"neural_cache", "tune_cache"} <= given.keys():
        raise UserError("Give --neural-cache or --tune-cache, not both.")
    run = load_run(options.folder, **loading(options))
    if not folder.result.exists():
        print("The run is not finished: these are intermediate weights.", file=sys.stderr)
    with work_bar("evaluating") as progress:
        measured = run.measure(options.split, data=options.data, progress=progress, **given)
    if options.json:
        print_json({"run": str(options.folder), "split": options.split, **measured.facts})
    else:
        print("\n".join(measured.lines))


def _generate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import RunFolder, load_run
    from torchdefine.run.run import check_can
    from torchdefine.tasks.sampling import SamplingOptions

    folder = RunFolder(options.folder)
    check_can(folder.recipe(), "generate", folder)  # first: a run without weights must not be told to get some
    if options.temperature == 0:
        refuse_idle(options, ("top_k", "top_p"), "at a temperature of 0")
    run = load_run(options.folder, **loading(options))
    outside = run.unknown_words(options.prompt)
    if outside:
        print(f"Outside the vocabulary, so read as <unk>: {', '.join(outside)}.", file=sys.stderr)
    unknown = run.tokenization.unk_id
    sampling = SamplingOptions(options.temperature, options.top_k, options.top_p, () if unknown is None else (unknown,))
    text = run.generate(options.prompt, options.length, sampling, seed=options.seed)
    if options.json:
        print_json({"prompt": options.prompt, "continuation": text})
    else:
        between = " " if run.tokenization.kind == "words" else ""
        print(f"{options.prompt}{between}{text}".strip())
