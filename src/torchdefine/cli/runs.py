"""Commands that use a run: measure it, let it write or translate, average its weights."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from inspect import signature
from pathlib import Path
from typing import Any

from torchdefine.cli.shared import LOADING, Command, add_shared, bar, open_run, print_json, refuse_idle, show, whole
from torchdefine.errors import UserError

MEASURING = ("batch_size", "length", "memory", "clamp", "neural_cache", "tune_cache")
"""Options of eval that the runs of some tasks take."""
OF_THE_BEAM = ("length_penalty", "max_ratio", "max_extra", "batch_size")
"""Options that change the settings of beam search that are called so; --beam changes its size."""

UNFINISHED = "The run is not finished: these are intermediate weights."


def add_commands(command: Command) -> None:
    """The commands that use a run."""
    own = "(default: the recipe's)"
    option = command("eval", _eval, "Measure a run on a text: perplexity, and for a translator also BLEU and chrF.")
    add_shared(option, "folder")
    option("--split", default="test", help="train, valid or test (default: test)")
    option("--data", help="another text: a folder, a text file, or a named corpus (default: the run's own)")
    option("--batch-size", type=whole, help=f"number of streams that the text is cut into; 1 is exact {own}")
    option("--length", type=whole, help=f"tokens per step {own}")
    option("--memory", type=whole, help=f"number of earlier positions that a Transformer-XL attends to {own}")
    option(
        "--clamp", type=whole, help=f"largest distance in a Transformer-XL; longer ones are treated as this one {own}"
    )
    option(
        "--neural-cache",
        metavar="WINDOW,THETA,WEIGHT",
        help="add a neural cache of the text that was read, as in 500,1.0,0.1",
    )
    tuning = "tune the three numbers of the neural cache on the validation text first"
    option("--tune-cache", action="store_true", default=None, help=tuning)
    add_shared(option, *LOADING, "--json")

    option = command("generate", _generate, "Generate text with a run: continue a prompt.")
    add_shared(option, "folder")
    option(
        "--prompt", default="", help="the text to continue, in words of the training text (default: start a new text)"
    )
    option("--length", type=whole, default=100, help="number of tokens to generate (default: 100)")
    option("--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy (default: 0.8)")
    option("--top-k", type=whole, help="sample only from the k most probable tokens")
    option("--top-p", type=float, help="sample only from the most probable tokens that have this probability together")
    option("--seed", type=int, help="random seed, for the same text every time (default: another text each time)")
    add_shared(option, *LOADING, "--json")

    option = command("translate", _translate, "Translate a text line by line: one output line for each input line.")
    add_shared(option, "folder")
    option("--input", help="the text file to translate, plain or compressed (default: standard input)")
    option("--refs", help="reference translations, line by line; prints BLEU and chrF on standard error")
    option("--beam", type=whole, help=f"size of the beam; 1 is greedy search {own}")
    option("--length-penalty", type=float, help=f"exponent of the length penalty of Wu et al. {own}")
    longest = "a translation has at most max-ratio × the source's tokens + max-extra"
    option("--max-ratio", type=float, help=f"{longest} {own}")
    option("--max-extra", type=whole, help=f"see --max-ratio {own}")
    option("--n-best", type=whole, default=1, help="number of translations per line, separated by tabs (default: 1)")
    option("--sample", action="store_true", help="sample translations instead of beam search")
    option("--temperature", type=float, help="with --sample: sampling temperature (default: 1)")
    option("--top-k", type=whole, help="with --sample: only from the k most probable tokens")
    option(
        "--top-p",
        type=float,
        help="with --sample: only from the most probable tokens that have this probability together",
    )
    option("--seed", type=int, help="with --sample: random seed (default: 1)")
    option("--batch-size", type=whole, help=f"sentences per batch; changes the speed, not the result {own}")
    add_shared(option, *LOADING, "--json")

    option = command("average", _average, "Average the latest checkpoints of a run (--train.keep) into one checkpoint.")
    add_shared(option, "folder")
    option("--last", type=whole, help="number of checkpoints to average, the latest ones (default: all)")
    add_shared(option, "--json")


def _eval(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import RunFolder
    from torchdefine.task import find_task

    folder = RunFolder(options.folder)
    task = find_task(folder.recipe().task)
    taken = signature(task.run.measure).parameters  # type: ignore[attr-defined]
    refuse_idle(options, [name for name in MEASURING if name not in taken], f"to a model for {task.name}")
    given = {name: value for name in MEASURING if (value := getattr(options, name)) is not None}
    if {"neural_cache", "tune_cache"} <= given.keys():
        raise UserError("Give --neural-cache or --tune-cache, not both.")
    run = open_run(options)
    if not folder.result.exists():
        print(UNFINISHED, file=sys.stderr)
    with bar("evaluating") as progress:
        measured = run.measure(options.split, data=options.data, progress=progress, **given)
    show(options, {"run": options.folder, "split": options.split, **measured.facts}, measured.lines)


def _generate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import RunFolder
    from torchdefine.run.run import check_can
    from torchdefine.tasks.sampling import SamplingOptions

    folder = RunFolder(options.folder)
    check_can(folder.recipe(), "generate", folder)  # first: a run without weights must not be told to get some
    if options.temperature == 0:
        refuse_idle(options, ("top_k", "top_p"), "at a temperature of 0")
    run = open_run(options)
    if outside := run.unknown_words(options.prompt):
        print(f"These words are not in the vocabulary and are read as <unk>: {', '.join(outside)}.", file=sys.stderr)
    unknown = run.tokenization.unk_id
    sampling = SamplingOptions(options.temperature, options.top_k, options.top_p, () if unknown is None else (unknown,))
    text = run.generate(options.prompt, options.length, sampling, seed=options.seed)
    between = " " if run.tokenization.kind == "words" else ""
    show(options, {"prompt": options.prompt, "continuation": text}, [f"{options.prompt}{between}{text}".strip()])


def _translate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import RunFolder
    from torchdefine.run.result import shortfall
    from torchdefine.run.run import check_can
    from torchdefine.task import find_task

    folder = RunFolder(options.folder)
    recipe = folder.recipe()
    check_can(recipe, "translate", folder)
    task: Any = find_task(recipe.task)
    how = task.run.options(recipe, **_ways_to_translate(options))
    if options.refs:
        task.check_packages()
    run = open_run(options)  # before waiting for standard input
    if trouble := shortfall(run.result) if folder.result.exists() else UNFINISHED:
        print(trouble, file=sys.stderr)
    lines, references = _texts(options)
    started = time.monotonic()
    with bar("translating") as progress:
        found = run.translate(lines, how, progress=progress, on_long_line=_tell_of_long_line)
    seconds = max(time.monotonic() - started, 1e-9)
    scores = run.score([best[0].text for best in found], references) if references else None
    if options.json:
        shown = [[dataclasses.asdict(translation) for translation in best] for best in found]
        scored = {} if scores is None else dataclasses.asdict(scores)
        print_json({"translations": shown, "sentences_per_second": round(len(found) / seconds, 2), **scored})
        return
    text = "".join("\t".join(t.text for t in best) + "\n" for best in found)
    if sys.stdout.isatty():
        print(text, end="")
    else:  # a file or another program gets every character as it is
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
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
    temperature = 1.0 if options.temperature is None else options.temperature
    sampling = SamplingOptions(temperature, options.top_k, options.top_p) if options.sample else None
    given = {"size": options.beam, "seed": options.seed, **{name: getattr(options, name) for name in OF_THE_BEAM}}
    given = {name: value for name, value in given.items() if value is not None}
    return {"seed": 1, **given, "sampling": sampling, "n_best": options.n_best}


def _texts(options: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """The lines to translate, and their true translations where these were given."""
    from torchdefine.data.text_files import decode_text, read_text

    def lines_of(path: str) -> list[str]:
        return [line for block in read_text(Path(path), may_be_empty=True) for line in block.lines]

    lines = lines_of(options.input) if options.input else decode_text(sys.stdin.buffer.read(), "The standard input")
    if not lines:
        print("There are no lines to translate.", file=sys.stderr)
    if not options.refs:
        return lines, None
    references = lines_of(options.refs)
    if len(references) != len(lines):
        raise UserError(f"{options.refs} has {len(references):,} lines, but {len(lines):,} are to be translated.")
    return lines, references


def _tell_of_long_line(number: int, tokens: int, pieces: int) -> None:
    print(f"Line {number:,} has {tokens:,} tokens and was translated in {pieces} pieces.", file=sys.stderr)


def _average(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import average_run

    folder, steps = average_run(options.folder, options.last)
    listed = ", ".join(f"{step:,}" for step in steps)
    sentence = f"The average of the weights of steps {listed} is in {folder.average}: use --checkpoint average."
    facts = {"run": options.folder, "averaged_steps": steps, "checkpoint": str(folder.average)}
    show(options, facts, [sentence])
