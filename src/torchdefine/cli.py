"""The command line: the only file that knows it."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchdefine import __version__
from torchdefine.errors import MachineError, UserError
from torchdefine.recipe import SECTIONS, Recipe, load_recipe, recipe_names
from torchdefine.settings import explain
from torchdefine.spelling import did_you_mean

DESCRIPTION = """Deep factorised token embeddings: train language models with any of them, and compare fairly.

  torchdefine recipes                                what there is to train
  torchdefine train demo/adaptive-define --out runs/first
  torchdefine eval runs/first
  torchdefine generate runs/first --prompt "The game"
  torchdefine compare runs/first runs/second
  torchdefine report runs/first runs/second          one HTML file with curves, maps, samples
  torchdefine adapt MODEL_DIR --budget 4MB --text corpus.txt --out smaller/
"""

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
    sub.add_argument("--length", type=int, help="tokens a step; changes speed, not the result")
    sub.add_argument("--checkpoint", default="best", choices=["best", "last"], help="which weights (default: best)")
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
    sub.add_argument("--checkpoint", default="best", choices=["best", "last"], help="which weights (default: best)")
    sub.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
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
        ["recipe", "what it trains", "M parameters", "valid", "test"],
        [
            [
                recipe.name,
                recipe.description,
                *(
                    f"{recipe.published[key]:.2f}" if key in recipe.published else "–"
                    for key in ("total", "valid_perplexity", "test_perplexity")
                ),
            ]
            for recipe in recipes
        ],
        note="Numbers are the paper's, on WikiText-103; `torchdefine params RECIPE` builds the model and counts.",
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
    for split in ("valid", "test"):
        if f"{split}_perplexity" in result:
            unigram = result.get(f"{split}_unigram_perplexity")
            beside = f" (unigram {unigram:,.1f})" if unigram else ""
            print(f"{split} perplexity {result[f'{split}_perplexity']:,.2f}{beside}")
    print(f"The run is in {run.folder.path}.")


def _eval(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.run import load_run
    from torchdefine.training.progress import work_bar

    run = load_run(options.folder, checkpoint=options.checkpoint, device=options.device)
    with work_bar("predicting") as progress:
        evaluation = run.evaluate(
            options.split,
            data=options.data,
            batch_size=options.batch_size,
            length=options.length,
            progress=progress,
        )
    if options.json:
        _print_json({"run": str(options.folder), "split": options.split, **evaluation.to_dict()})
        return
    bits = f", {evaluation.bits_per_byte:.4f} bits per byte" if evaluation.bits_per_byte else ""
    print(f"{options.split} perplexity {evaluation.perplexity:,.4f} (loss {evaluation.loss:.5f} nats{bits})")
    print(f"{evaluation.tokens:,} tokens, {evaluation.unknown_share:.2%} of them outside the vocabulary")
    print(evaluation.protocol)


def _generate(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.decoding import SamplingOptions
    from torchdefine.run import load_run

    run = load_run(options.folder, checkpoint=options.checkpoint, device=options.device)
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
