"""The command line: the only file that knows it."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from torchdefine import __version__
from torchdefine.errors import MachineError, UserError
from torchdefine.recipe import SECTIONS, Recipe, load_recipe, recipe_names
from torchdefine.settings import explain
from torchdefine.spelling import did_you_mean

if TYPE_CHECKING:
    from torchdefine.decoding import NeuralCache

DESCRIPTION = """Deep factorised token embeddings: train language models with any of them, and compare fairly.

  torchdefine recipes                                what there is to train
  torchdefine train demo/adaptive-define --out runs/first
  torchdefine eval runs/first
  torchdefine generate runs/first --prompt "The game"
  torchdefine translate runs/second < english.txt > german.txt
  torchdefine compare runs/first runs/second
  torchdefine report runs/first runs/second          one HTML file with curves, maps, samples
  torchdefine adapt MODEL_DIR --budget 4MB --text corpus.txt --out smaller/
"""

CHECKPOINTS = ["best", "last", "average"]

PICTURES = """  curves      validation perplexity of every run
  parameters  who owns the parameters, a stacked bar a run
  maps        correlation maps of the finished vectors: standard, projected, DeFINE
  layers      correlation maps of one run with a DeFINE unit, layer by layer and group by group
  groups      mean cosines between the groups of every layer of such a run"""

ADAPTING = """  Many replacements are made, all are measured by what the model does with them, and the best that fits is
  taken: low ranks, DeFINE and MLP units, numbers of few bits, codes, and mixtures of them. The new folder holds the
  model, what lay beside it, adapt.json with every number, and front.svg. After `import torchdefine` it loads by
  AutoModel."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done, 1 failed, 2 misused."""
    for name in ("stdout", "stderr"):  # closed by the caller, so nobody wants to hear us
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        options, rest = _parser().parse_known_args(arguments)
        overrides = _overrides(rest, options.command)
        options.run(options, overrides)
    except UserError as error:
        _fail(error, 2)
    except MachineError as error:
        _fail(error, 1)
    except BrokenPipeError:  # whoever read our output has gone away
        os._exit(1)
    except OSError as error:
        _fail(f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}.", 1)
    except KeyboardInterrupt:
        _fail("Interrupted.", 1)
    except (MemoryError, RuntimeError) as error:
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
        _fail("There is not enough memory for this: use a smaller model or batch.", 1)
    sys.exit(0)


def _fail(message: object, code: int) -> NoReturn:
    print(f"torchdefine: {message}", file=sys.stderr)
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message[0].upper()}{message[1:]}. See `{self.prog} --help`.", 2)


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="torchdefine", description=DESCRIPTION, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"torchdefine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Callable[..., None], summary: str, more: str = "") -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=summary, description=f"{summary}\n\n{more}", formatter_class=shape, allow_abbrev=False
        )
        added.set_defaults(run=run)
        return added

    _add_recipe_commands(command)
    _add_run_commands(command)
    _add_translation_commands(command)
    _add_looking_commands(command)
    _add_model_commands(command)
    return parser


def _add_recipe_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """What starts from a recipe."""
    sub = command("recipes", _recipes, "List what there is to train, with parameters and published numbers.")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("params", _params, "Show a recipe's parameters by part, ours beside the paper's.", _settings_help())
    sub.add_argument("recipe", help="a recipe's name, or a YAML file")
    sub.add_argument("--plan", action="store_true", help="print the layers of the unit too")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("train", _train, "Train a recipe on a text.", _settings_help())
    sub.add_argument("recipe", help="a recipe's name, or a YAML file")
    sub.add_argument("--data", help="a folder with train, valid and test text, or a named corpus")
    sub.add_argument("--out", help="the run's folder (default: a new one under runs/)")
    sub.add_argument("--resume", action="store_true", help="go on with the run in --out")
    sub.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    sub.add_argument("--tensorboard", action="store_true", help="write TensorBoard logs into the run's folder too")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")

    sub = command(
        "demo", _demo, "Train four small language models on the shipped text and compare them: about 4 minutes."
    )
    sub.add_argument("--out", default="runs/demo", help="where the runs and the report go (default: runs/demo)")


def _add_run_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """What uses a run."""
    sub = command("eval", _eval, "Measure a run's perplexity on a text.")
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument("--split", default="test", help="train, valid or test (default: test)")
    sub.add_argument("--data", help="another text than the run's own: a folder, or a named corpus")
    sub.add_argument("--batch-size", type=int, help="streams the text is cut into; 1 is exact (default: the recipe's)")
    sub.add_argument("--length", type=int, help="tokens a step (default: the recipe's)")
    sub.add_argument("--memory", type=int, help="positions a Transformer-XL remembers (default: the recipe's)")
    sub.add_argument("--clamp", type=int, help="the largest distance that it tells apart (default: the recipe's)")
    sub.add_argument(
        "--neural-cache", metavar="WINDOW,THETA,SHARE", help="look back at the text itself, as in 500,1.0,0.1"
    )
    sub.add_argument("--tune-cache", action="store_true", help="choose these three on the validation text first")
    sub.add_argument("--checkpoint", default="best", choices=CHECKPOINTS, help="which weights (default: best)")
    sub.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("generate", _generate, "Let a run continue a text.")
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument("--prompt", default="", help="the text to continue; words as in the training text")
    sub.add_argument("--length", type=int, default=100, help="tokens to draw (default: 100)")
    sub.add_argument("--temperature", type=float, default=0.8, help="below 1 is more cautious, 0 greedy (default: 0.8)")
    sub.add_argument("--top-k", type=int, help="draw among the k most probable tokens only")
    sub.add_argument("--top-p", type=float, help="draw among the most probable tokens that make up this share")
    sub.add_argument("--seed", type=int, help="for the same text every time")
    sub.add_argument("--checkpoint", default="best", choices=CHECKPOINTS, help="which weights (default: best)")
    sub.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _add_translation_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """What uses a run that translates."""
    sub = command("translate", _translate, "Translate text line by line; as many lines come out as go in.")
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument("--input", help="the text to translate, plain or packed (default: standard input)")
    sub.add_argument("--refs", help="true translations, line by line; BLEU and chrF go to standard error")
    sub.add_argument("--beam", type=int, help="hypotheses that the search keeps; 1 is greedy (default: the recipe's)")
    sub.add_argument("--length-penalty", type=float, help="exponent of Wu's length penalty (default: the recipe's)")
    sub.add_argument("--max-ratio", type=float, help="target tokens for each of the source's, at most")
    sub.add_argument("--max-extra", type=int, help="and so many more")
    sub.add_argument("--n-best", type=int, default=1, help="translations of each line, with tabs between (default: 1)")
    sub.add_argument("--sample", action="store_true", help="draw translations instead of searching for the best")
    sub.add_argument("--temperature", type=float, default=1.0, help="of --sample: below 1 is more cautious")
    sub.add_argument("--top-k", type=int, help="of --sample: among the k most probable tokens only")
    sub.add_argument("--top-p", type=float, help="of --sample: among the tokens that make up this share")
    sub.add_argument("--seed", type=int, default=1, help="of --sample (default: 1)")
    sub.add_argument("--batch-size", type=int, help="sentences at once; changes speed, not the result")
    sub.add_argument("--checkpoint", default="best", choices=CHECKPOINTS, help="which weights (default: best)")
    sub.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    sub.add_argument("--json", action="store_true", help="print JSON, with log-probabilities and scores")

    sub = command("average", _average, "Average the weights that a run has kept (--train.keep) into one checkpoint.")
    sub.add_argument("folder", metavar="RUN", help="a run's folder")
    sub.add_argument("--last", type=int, help="how many of the latest ones (default: all)")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _add_looking_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """What shows runs to people."""
    sub = command("compare", _compare, "Put finished runs side by side: parameters, perplexities, speed.")
    sub.add_argument("folders", metavar="RUN", nargs="+", help="runs' folders")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("report", _report, "Write one HTML file about runs, finished or not; it opens from disk.")
    sub.add_argument("folders", metavar="RUN", nargs="+", help="runs' folders")
    sub.add_argument("--out", help="the HTML file (default: report.html in the first run's folder)")
    sub.add_argument("--words", help="words whose nearest neighbours to show, with commas between")
    sub.add_argument("--prompt", default="The", help="the text that the runs continue (default: The)")

    sub = command("plot", _plot, "Draw one picture of runs for a paper: PNG, SVG or PDF.", PICTURES)
    sub.add_argument("kind", choices=["curves", "parameters", "maps", "layers", "groups"], help="which picture")
    sub.add_argument("folders", metavar="RUN", nargs="+", help="runs' folders")
    sub.add_argument("--out", required=True, help="the file to write, ending in .png, .svg or .pdf")
    sub.add_argument("--by", default="tokens", choices=["tokens", "step", "seconds"], help="the curves' axis")
    sub.add_argument("--centred", action="store_true", help="maps of Pearson's correlations instead of the paper's")


def _add_model_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """What changes a model that exists."""
    sub = command("adapt", _adapt, "Replace the token table of a Hugging Face model by the best smaller one.", ADAPTING)
    sub.add_argument("folder", metavar="MODEL_DIR", help="a folder that save_pretrained wrote, with its tokenizer")
    sub.add_argument("--budget", required=True, help="for the table: 4MB, 512KiB, or '4M parameters' in float32")
    sub.add_argument("--text", required=True, help="a file of plain text like that which the model will read")
    sub.add_argument("--out", required=True, help="the new model's folder")
    sub.add_argument("--quick", action="store_true", help="leave out what is trained for minutes: units and codes")
    sub.add_argument("--distill", type=int, default=200, help="steps of self-distillation, 0 for none (default: 200)")
    sub.add_argument("--choosing", type=int, default=300, help="sentences to compare candidates on (default: 300)")
    sub.add_argument("--held-out", type=int, default=2000, help="sentences to judge the result on (default: 2000)")
    sub.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _settings_help() -> str:
    """Every setting that a command line may change, section by section."""
    lines = ["Any setting of the recipe can be changed by --SECTION.NAME VALUE, as in --optim.lr 1e-3:", ""]
    for name, default, explanation in explain(Recipe):
        lines.append(f"  --{name:<28} {explanation} [{default}]")
    return "\n".join(lines)


def _overrides(rest: list[str], command: str) -> dict[str, dict[str, Any]]:
    """What is left of the command line, ``--optim.lr 1e-3`` or ``--optim.lr=1e-3``, by section."""
    found: dict[str, dict[str, Any]] = {}
    names = [name for name, _, _ in explain(Recipe)]
    words = iter(rest)
    for word in words:
        if not word.startswith("--") or command not in ("train", "params"):
            raise UserError(f"The argument {word!r} is not understood: see `torchdefine {command} --help`.")
        dotted, given, value = word[2:].partition("=")
        if dotted not in names:
            raise UserError(f"The setting --{dotted} is unknown{did_you_mean(dotted, names)}")
        if not given:
            value = next(words, "")
            if not value:
                raise UserError(f"The setting --{dotted} needs a value: --{dotted} VALUE.")
        section, name = dotted.split(".", 1)
        found.setdefault(section, {})[name] = value
    assert all(section in SECTIONS for section in found)
    return found


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _recipes(options: argparse.Namespace, _: dict[str, Any]) -> None:
    recipes = [load_recipe(name) for name in recipe_names()]
    if options.json:
        _print_json([{"name": r.name, "description": r.description, "published": r.published} for r in recipes])
        return
    from torchdefine.analysis.tables import print_table

    print_table(
        ["recipe", "what it trains", "M parameters", "valid", "test", "BLEU"],
        [
            [
                recipe.name,
                recipe.description,
                *(
                    f"{recipe.published[key]:.2f}" if key in recipe.published else "–"
                    for key in ("total", "valid_perplexity", "test_perplexity", "bleu_newstest2014")
                ),
            ]
            for recipe in recipes
        ],
        note="Numbers are the paper's, on WikiText-103, BLEU on newstest2014; `torchdefine params RECIPE` builds the "
        "model and counts.",
    )


def _params(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.analysis.parameters import parameter_report, print_parameters

    recipe = load_recipe(options.recipe, overrides)
    report = parameter_report(recipe)
    if options.json:
        _print_json(report.to_dict())
    else:
        print_parameters(report, with_plan=options.plan)


def _train(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.run import train
    from torchdefine.training.distributed import Processes
    from torchdefine.training.precision import Precision
    from torchdefine.training.progress import TensorBoardReporter, default_reporter, work_bar

    recipe = load_recipe(options.recipe, overrides)
    note = Precision(recipe.train.precision, Processes().device(options.device)).note
    if note:
        print(note, file=sys.stderr)
    reporter: Any = default_reporter()
    if options.tensorboard:
        if not options.out:
            raise UserError("TensorBoard logs go into the run's folder: name it with --out.")
        reporter = TensorBoardReporter(reporter, str(Path(options.out) / "tensorboard"))
    with work_bar("reading the text") as progress:
        run = train(
            options.recipe,
            data=overrides.pop("data", {}) | ({} if options.data is None else {"corpus": options.data}),
            out=options.out,
            resume=options.resume,
            device=options.device,
            reporter=reporter,
            progress=progress,
            **overrides,
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process speaks for all
        return
    result = run.result
    if options.json:
        _print_json(result)
        return
    if "test_bleu" in result:
        print(f"test BLEU {result['test_bleu']:.2f}, chrF {result['test_chrf']:.2f}")
    for split in ("valid", "test"):
        if f"{split}_perplexity" in result:
            unigram = result.get(f"{split}_unigram_perplexity")
            beside = f" (unigram {unigram:,.1f})" if unigram else ""
            print(f"{split} perplexity {result[f'{split}_perplexity']:,.2f}{beside}")
    print(f"The run is in {run.folder.path}.")


def _eval(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import load_run
    from torchdefine.training.evaluate import PUBLIC_STREAMS
    from torchdefine.training.progress import work_bar

    cache = _neural_cache(options)
    run = load_run(options.folder, checkpoint=options.checkpoint, device=options.device)
    if run.recipe.task == "translation":
        _eval_translations(run, options)
        return
    if options.tune_cache:
        with work_bar("tuning the cache") as progress:
            cache = run.tune_cache(data=options.data, batch_size=options.batch_size, progress=progress)
    settings = {name: getattr(options, name) for name in ("data", "length", "memory", "clamp")} | {"cache": cache}
    with work_bar("predicting") as progress:
        evaluation = run.evaluate(options.split, batch_size=options.batch_size, progress=progress, **settings)
    public = None
    if run.recipe.eval.public and options.batch_size is None:
        with work_bar("predicting in 10 streams") as progress:
            public = run.evaluate(options.split, batch_size=PUBLIC_STREAMS, progress=progress, **settings)
    if options.json:
        beside = {} if cache is None else {"neural_cache": asdict(cache)}
        beside |= {} if public is None else {"public": public.to_dict()}
        _print_json({"run": str(options.folder), "split": options.split, **evaluation.to_dict(), **beside})
        return
    if options.tune_cache and cache is not None:
        print(f"Best on the validation text: --neural-cache {cache.window},{cache.theta:g},{cache.share:g}")
    bits = f", {evaluation.bits_per_byte:.4f} bits per byte" if evaluation.bits_per_byte else ""
    print(f"{options.split} perplexity {evaluation.perplexity:,.4f} (loss {evaluation.loss:.5f} nats{bits})")
    print(f"{evaluation.tokens:,} tokens, {evaluation.unknown_share:.2%} of them outside the vocabulary")
    print(evaluation.protocol)
    if public is not None:
        print(f"public protocol: perplexity {public.perplexity:,.4f} (loss {public.loss:.5f} nats)")
        print(public.protocol)


def _eval_translations(run: Any, options: argparse.Namespace) -> None:
    from torchdefine.training.progress import work_bar

    if any((options.batch_size, options.length, options.neural_cache, options.tune_cache)):
        raise UserError("--batch-size, --length and the neural cache are for language models, not for a translator.")
    with work_bar("translating") as progress:
        evaluation = run.evaluate_translations(options.split, data=options.data, progress=progress)
    if options.json:
        _print_json({"run": str(options.folder), "split": options.split, **evaluation.to_dict()})
        return
    predicted = evaluation.predicted
    print(f"{options.split} perplexity {predicted.perplexity:,.4f} (loss {predicted.loss:.5f} nats)")
    _print_scores(evaluation.scores, sys.stdout)
    print(f"{predicted.tokens:,} target tokens, {evaluation.sentences_per_second:,.1f} sentences a second")
    print(evaluation.protocol)


def _print_scores(scores: Any, stream: TextIO) -> None:
    print(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}", file=stream)
    print(f"chrF {scores.chrf:.2f}  {scores.chrf_signature}", file=stream)


def _translate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.data.text_files import decode_text, read_text
    from torchdefine.decoding import require_sacrebleu, score_translations
    from torchdefine.run import load_run
    from torchdefine.training.progress import work_bar

    def lines_of(path: str) -> list[str]:
        return [line for block in read_text(Path(path)) for line in block.lines]

    lines = lines_of(options.input) if options.input else decode_text(sys.stdin.buffer.read(), "The standard input")
    references = None
    if options.refs:
        require_sacrebleu()
        references = lines_of(options.refs)
        if len(references) != len(lines):
            raise UserError(f"{options.refs} has {len(references):,} lines, but {len(lines):,} are to be translated.")
    run = load_run(options.folder, checkpoint=options.checkpoint, device=options.device)
    started = time.monotonic()
    with work_bar("translating") as progress:
        found = run.translate(
            lines,
            _translation_options(run.recipe, options),
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
        _print_json({"translations": shown, "sentences_per_second": round(len(found) / seconds, 2), **scored})
        return
    sys.stdout.flush()
    sys.stdout.buffer.write("".join("\t".join(t.text for t in best) + "\n" for best in found).encode())
    sys.stdout.buffer.flush()
    if scores is not None:
        _print_scores(scores, sys.stderr)


def _translation_options(recipe: Recipe, options: argparse.Namespace) -> Any:
    """The recipe's search with what the command line changes of it."""
    from torchdefine.build_translation import beam_options
    from torchdefine.decoding import SamplingOptions, TranslationOptions

    names = {"beam": "size", "length_penalty": "length_penalty", "max_ratio": "max_ratio", "max_extra": "max_extra"}
    changes = {to: getattr(options, name) for name, to in names.items() if getattr(options, name) is not None}
    beam = dataclasses.replace(beam_options(recipe), **changes)
    sampling = SamplingOptions(options.temperature, options.top_k, options.top_p) if options.sample else None
    batch_size = recipe.beam.batch_size if options.batch_size is None else options.batch_size
    return TranslationOptions(beam, sampling, options.seed, options.n_best, batch_size)


def _average(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import average_run

    folder, steps = average_run(options.folder, options.last)
    if options.json:
        _print_json({"run": str(options.folder), "averaged_steps": steps, "checkpoint": str(folder.average)})
    else:
        listed = ", ".join(f"{step:,}" for step in steps)
        print(f"The mean of the weights of the steps {listed} is in {folder.average}: use it by --checkpoint average.")


def _neural_cache(options: argparse.Namespace) -> NeuralCache | None:
    from torchdefine.decoding import NeuralCache

    given = options.neural_cache
    if given is None:
        return None
    if options.tune_cache:
        raise UserError("Give --neural-cache or --tune-cache, not both.")
    try:
        window, theta, share = given.split(",")
        numbers = int(window), float(theta), float(share)
    except ValueError:
        raise UserError(f"--neural-cache is {given!r}, but must be three numbers, as in 500,1.0,0.1.") from None
    return NeuralCache(*numbers)


def _generate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.decoding import SamplingOptions
    from torchdefine.run import load_run

    run = load_run(options.folder, checkpoint=options.checkpoint, device=options.device)
    run.check_generates()
    unknown = run.tokenization.unk_id
    sampling = SamplingOptions(options.temperature, options.top_k, options.top_p, () if unknown is None else (unknown,))
    text = run.generate(options.prompt, options.length, sampling, seed=options.seed)
    if options.json:
        _print_json({"prompt": options.prompt, "continuation": text})
    else:
        between = " " if run.tokenization.kind == "words" else ""
        print(f"{options.prompt}{between}{text}".strip())


def _compare(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.comparison import compare_runs, print_comparison

    comparison = compare_runs(options.folders)
    if options.json:
        _print_json(comparison.to_dict())
    else:
        print_comparison(comparison)


def _report(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.report import WORDS, ReportOptions, write_report
    from torchdefine.training.progress import work_bar

    path = Path(options.out) if options.out else Path(options.folders[0]) / "report.html"
    words = options.words.split(",") if options.words else WORDS
    with work_bar("looking at the runs") as progress:
        write_report(options.folders, path, ReportOptions(words, options.prompt), progress)
    print(f"The report is in {path}.")


def _plot(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.plots import draw

    path = Path(options.out)
    draw(options.kind, options.folders, path, by=options.by, centred=options.centred)
    print(f"The picture is in {path}.")


def _demo(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.demo import run_demo

    run_demo(Path(options.out))


def _adapt(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.adapt.model_folder import import_transformers
    from torchdefine.adapt.shrink import ShrinkOptions, shrink_model
    from torchdefine.training.distributed import Processes

    their_log = import_transformers().logging  # its bars and notes would stand between ours
    their_log.set_verbosity_error()
    their_log.disable_progress_bar()
    settings = ShrinkOptions(
        choosing=options.choosing,
        held_out=options.held_out,
        distill_steps=options.distill,
        quick=options.quick,
        device=str(Processes().device(options.device)),
    )
    shrunk = shrink_model(options.folder, options.text, options.out, options.budget, options=settings, stage=_stage)
    if options.json:
        _print_json(shrunk.to_dict())
        return
    for fitted in shrunk.fitted.values():
        fitted.print()
    print(shrunk.replacement)
    print(
        f"On {shrunk.held_out:,} held-out sentences, mean cosine {shrunk.likeness.mean_cosine:.4f} and rank "
        f"correlation {shrunk.likeness.rank_correlation:.4f} to the old model."
    )
    before, after = (size / 1e6 for size in shrunk.file_bytes)
    print(f"Weights {before:,.1f} → {after:,.1f} MB on disk, in {shrunk.seconds:,.0f} s.")
    print(f"The model is in {shrunk.folder}.")


def _stage(what: str) -> Any:
    """A bar on a terminal, a line everywhere else."""
    from torchdefine.training.progress import work_bar

    if not sys.stderr.isatty():
        print(what, file=sys.stderr)
    return work_bar(what)
