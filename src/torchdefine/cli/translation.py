"""Commands that translate."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from torchdefine.cli.shared import CHECKPOINTS, Command, add_cached, add_device, loading, print_json, refuse_idle
from torchdefine.errors import UserError
from torchdefine.recipe import Recipe


def add_commands(command: Command) -> None:
    """The commands for translators."""
    sub = command("translate", _translate, "Translate text line by line; as many lines come out as go in.")
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
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
    sub.add_argument("--top-p", type=float, help="of --sample: among the most probable tokens that make up this share")
    sub.add_argument("--seed", type=int, help="of --sample (default: 1)")
    sub.add_argument(
        "--batch-size", type=int, help="sentences at once; changes speed, not the result (default: the recipe's)"
    )
    sub.add_argument("--checkpoint", default="best", choices=CHECKPOINTS, help="which weights (default: best)")
    add_cached(sub)
    add_device(sub)
    sub.add_argument("--json", action="store_true", help="print JSON, with log-probabilities and scores")

    sub = command("average", _average, "Average the weights that a run has kept (--train.keep) into one checkpoint.")
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument("--last", type=int, help="how many of the latest ones (default: all)")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _translate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.data.text_files import decode_text, read_text
    from torchdefine.decoding import require_sacrebleu, score_translations
    from torchdefine.run import load_run
    from torchdefine.training.progress import work_bar

    def lines_of(path: str) -> list[str]:
        return [line for block in read_text(Path(path), may_be_empty=True) for line in block.lines]

    run = load_run(options.folder, **loading(options))  # before waiting for standard input
    run.check_translates()
    how = _translation_options(run.recipe, options)
    lines = lines_of(options.input) if options.input else decode_text(sys.stdin.buffer.read(), "The standard input")
    if not lines:
        print("There is no line to translate.", file=sys.stderr)
    references = None
    if options.refs:
        require_sacrebleu()
        references = lines_of(options.refs)
        if len(references) != len(lines):
            raise UserError(f"{options.refs} has {len(references):,} lines, but {len(lines):,} are to be translated.")
    started = time.monotonic()
    with work_bar("translating") as progress:
        found = run.translate(
            lines,
            how,
            progress=progress,
            on_long_line=lambda long: print(
                f"Line {long.number:,} has {long.tokens:,} tokens and was translated in {long.pieces} pieces.",
                file=sys.stderr,
            ),
        )
    seconds = max(time.monotonic() - started, 1e-9)
    scores = score_translations([best[0].text for best in found], references) if references else None
    if options.json:
        shown = [[{"text": t.text, "log_prob": t.log_prob, "score": t.score} for t in best] for best in found]
        scored = {} if scores is None else scores.to_dict()
        print_json({"translations": shown, "sentences_per_second": round(len(found) / seconds, 2), **scored})
        return
    sys.stdout.flush()
    sys.stdout.buffer.write("".join("\t".join(t.text for t in best) + "\n" for best in found).encode())
    sys.stdout.buffer.flush()
    if scores is not None:
        _print_scores(scores, sys.stderr)


def _translation_options(recipe: Recipe, options: argparse.Namespace) -> Any:
    """The recipe's search with the command line's changes."""
    from torchdefine.build_translation import beam_options
    from torchdefine.decoding import SamplingOptions, TranslationOptions

    if options.sample:
        refuse_idle(options, ("beam",), "to --sample")
    else:
        refuse_idle(options, ("temperature", "top_k", "top_p", "seed"), "without --sample")
    if options.temperature == 0:
        refuse_idle(options, ("top_k", "top_p"), "at a temperature of 0")
    names = {"beam": "size", "length_penalty": "length_penalty", "max_ratio": "max_ratio", "max_extra": "max_extra"}
    changes = {to: getattr(options, name) for name, to in names.items() if getattr(options, name) is not None}
    beam = dataclasses.replace(beam_options(recipe), **changes)
    temperature = 1.0 if options.temperature is None else options.temperature
    sampling = SamplingOptions(temperature, options.top_k, options.top_p) if options.sample else None
    batch_size = recipe.beam.batch_size if options.batch_size is None else options.batch_size
    seed = 1 if options.seed is None else options.seed
    return TranslationOptions(beam, sampling, seed, options.n_best, batch_size)


def eval_translations(run: Any, options: argparse.Namespace) -> None:
    from torchdefine.training.progress import work_bar

    of_language_models = ("batch_size", "length", "memory", "clamp", "neural_cache")
    if options.tune_cache or any(getattr(options, name) is not None for name in of_language_models):
        raise UserError(
            "--batch-size, --length, --memory, --clamp and the neural cache are for language models, not for a "
            "translator."
        )
    with work_bar("translating") as progress:
        evaluation = run.evaluate_translations(options.split, data=options.data, progress=progress)
    if options.json:
        print_json({"run": str(options.folder), "split": options.split, **evaluation.to_dict()})
        return
    predicted = evaluation.predicted
    print(f"{options.split} perplexity {predicted.perplexity:,.4f} (loss {predicted.loss:.5f} nats)")
    _print_scores(evaluation.scores, sys.stdout)
    print(f"{predicted.tokens:,} target tokens, {evaluation.sentences_per_second:,.1f} sentences a second")
    print(evaluation.protocol)


def _print_scores(scores: Any, stream: TextIO) -> None:
    print(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}", file=stream)
    print(f"chrF {scores.chrf:.2f}  {scores.chrf_signature}", file=stream)


def _average(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import average_run

    folder, steps = average_run(options.folder, options.last)
    if options.json:
        print_json({"run": str(options.folder), "averaged_steps": steps, "checkpoint": str(folder.average)})
    else:
        listed = ", ".join(f"{step:,}" for step in steps)
        print(f"The mean of the weights of the steps {listed} is in {folder.average}: use it by --checkpoint average.")
