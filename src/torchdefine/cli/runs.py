"""Commands that use a run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchdefine.cli.shared import CHECKPOINTS, Command, add_cached, add_device, loading, print_json, refuse_idle
from torchdefine.cli.translation import eval_translations
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from torchdefine.decoding import NeuralCache


def add_commands(command: Command) -> None:
    """The commands that use a run."""
    sub = command("eval", _eval, "Measure a run's perplexity on a text; a translator's BLEU and chrF too.")
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
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
        help="choose the three numbers of --neural-cache on the validation text first",
    )
    sub.add_argument("--checkpoint", default="best", choices=CHECKPOINTS, help="which weights (default: best)")
    add_cached(sub)
    add_device(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("generate", _generate, "Let a run continue a text.")
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument(
        "--prompt",
        default="",
        help="the text to continue, words as in the training text (default: none, a text begins)",
    )
    sub.add_argument("--length", type=int, default=100, help="tokens to draw (default: 100)")
    sub.add_argument("--temperature", type=float, default=0.8, help="below 1 is more cautious, 0 greedy (default: 0.8)")
    sub.add_argument("--top-k", type=int, help="draw among the k most probable tokens only")
    sub.add_argument(
        "--top-p", type=float, help="draw among the most probable tokens that have this probability together"
    )
    sub.add_argument(
        "--seed", type=int, help="any number, for the same text every time (default: another text each time)"
    )
    sub.add_argument("--checkpoint", default="best", choices=CHECKPOINTS, help="which weights (default: best)")
    add_cached(sub)
    add_device(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")


def _eval(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import load_run
    from torchdefine.run.describe_data import MANY_UNKNOWN
    from torchdefine.training.evaluate import PUBLIC_STREAMS, short_stream_warning
    from torchdefine.training.progress import work_bar

    cache = _neural_cache(options)
    run = load_run(options.folder, **loading(options))
    if not run.folder.result.exists():
        print("The run is not finished: these are intermediate weights.", file=sys.stderr)
    if run.recipe.task == "translation":
        eval_translations(run, options)
        return
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("data", "length", "memory", "clamp")}
    unigram = run.unigram_perplexity(options.split, data=options.data)
    if options.tune_cache:
        with work_bar("tuning the cache") as progress:
            cache = run.tune_cache(batch_size=options.batch_size, progress=progress, **settings)
    settings["cache"] = cache
    with work_bar("predicting") as progress:
        evaluation = run.evaluate(options.split, batch_size=options.batch_size, progress=progress, **settings)
    public = None
    if run.recipe.eval.public and options.batch_size is None:
        with work_bar("predicting in 10 streams") as progress:
            public = run.evaluate(options.split, batch_size=PUBLIC_STREAMS, progress=progress, **settings)
    if options.json:
        beside: dict[str, Any] = {} if unigram is None else {"unigram_perplexity": unigram}
        beside |= {} if cache is None else {"neural_cache": asdict(cache)}
        beside |= {} if public is None else {"public": public.to_dict()}
        print_json({"run": str(options.folder), "split": options.split, **evaluation.to_dict(), **beside})
        return
    if options.tune_cache and cache is not None:
        print(f"Best on the validation text: --neural-cache {cache.window},{cache.theta:g},{cache.weight:g}")
    bits = f", {evaluation.bits_per_byte:.4f} bits per byte" if evaluation.bits_per_byte else ""
    counting = "" if unigram is None else f"unigram {unigram:,.1f}, "
    print(f"{options.split} perplexity {evaluation.perplexity:,.4f} ({counting}loss {evaluation.loss:.5f} nats{bits})")
    print(f"{evaluation.tokens:,} tokens, {evaluation.unknown_share:.2%} of them outside the vocabulary")
    print(evaluation.protocol)
    if evaluation.unknown_share > MANY_UNKNOWN:
        print("So many unknown words flatter a model: compare its numbers with those of the same vocabulary only.")
    streams = run.recipe.eval.batch_size if options.batch_size is None else options.batch_size
    short = short_stream_warning(evaluation.tokens, streams)
    if short:
        print(f"{short} --batch-size 1 is exact.")
    if public is not None:
        print(f"public protocol: perplexity {public.perplexity:,.4f} (loss {public.loss:.5f} nats)")
        print(public.protocol)


def _neural_cache(options: argparse.Namespace) -> NeuralCache | None:
    from torchdefine.decoding import NeuralCache

    given = options.neural_cache
    if given is None:
        return None
    if options.tune_cache:
        raise UserError("Give --neural-cache or --tune-cache, not both.")
    try:
        window, theta, weight = given.split(",")
        numbers = int(window), float(theta), float(weight)
    except ValueError:
        raise UserError(f"--neural-cache is {given!r}, but must be three numbers, as in 500,1.0,0.1.") from None
    return NeuralCache(*numbers)


def _generate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.decoding import SamplingOptions
    from torchdefine.run import load_run
    from torchdefine.run.loaded import check_generates
    from torchdefine.training import RunFolder

    folder = RunFolder(options.folder)
    check_generates(folder, folder.recipe())  # first: a translator without weights must not be told to get some
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
