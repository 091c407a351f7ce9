"""The commands and their settings, parsed; every failure ends in one sentence and an exit code.

What a command needs is imported when it runs: torch takes seconds, and a page of help needs none of it.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from torchdefine import __version__
from torchdefine.cli import Exhausted, completion, ended_by_interrupts, inference, recipes, runs, training
from torchdefine.errors import MachineError, UnknownSetting, UserError
from torchdefine.plain import PrintedStream
from torchdefine.spelling import closest, did_you_mean

SECONDS_TO_SPEAK = 10.0
"""Time for the first process of a machine to say why a command is refused, since it may be later than the others."""
WITH_SETTINGS = ("train", "encode", "params", "search")
"""The commands that take settings of the recipe."""
WITH_KINDS = ("embedding", "unit", "context", "output", "optim", "schedule", "averaging")
"""Sections of which there are several kinds: ``--unit define`` is short for ``--unit.kind define``."""
NO_SECTIONS = ("recipe", "out", "resume", "device", "reporter", "progress", "verbose")
"""Arguments of ``train``."""
SETTING = re.compile(rf"--(\w+\.[\w.]+|{'|'.join(WITH_KINDS)})(=.*)?", re.DOTALL)

DESCRIPTION = """Make the token table of a model several times smaller, before or after training, and measure the cost.

  torchdefine adapt MODEL_DIR --budget 4MB --text corpus.txt --out smaller/    a trained model of transformers
  torchdefine recipes                                what you can train; with a name, the settings of a recipe
  torchdefine train demo/adaptive-define --out runs/first
  torchdefine eval runs/first
  torchdefine generate runs/first --prompt "The game"
  torchdefine cache runs/first                       computes all token vectors once: eval RUN --cached
  torchdefine compress runs/first                    packs them into few bytes: eval RUN --compressed
  torchdefine export runs/first --format onnx --out exported/
  torchdefine translate runs/second < english.txt > german.txt
  torchdefine compare runs/first runs/second
  torchdefine report runs/first runs/second          one HTML file with curves, maps and samples
"""


def run_command(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exits with 1 if the machine failed, with 2 if it was misused, with 130 if it was interrupted."""
    with _printed_streams():
        _speak_alone()
        settings: dict[str, dict[str, Any]] = {}
        try:
            try:
                _run(list(sys.argv[1:] if arguments is None else arguments), settings)
            finally:
                _flush()
        except UnknownSetting as error:
            written = [f"{section}.{name}".lstrip(".") for section, given in settings.items() for name in given]
            _fail(error.as_option() if error.dotted in written else error, error.exit_code)
        except (UserError, MachineError) as error:
            _fail(error, error.exit_code)
        except BrokenPipeError:  # the reader of our output is gone
            os._exit(1)
        except Exception as error:
            if lacks := what_the_machine_lacks(error):
                with suppress(SystemExit):
                    _fail(f"There is not enough {lacks}.", 1)
                raise Exhausted(1) from None
            if not isinstance(error, OSError):
                raise
            from torchdefine.files import NOT_ALLOWED

            what = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
            if error.errno in NOT_ALLOWED:
                _fail(f"{what}: choose another path, or check its permissions.", 2)
            _fail(f"{what}.", 1)


def _run(words: list[str], settings: dict[str, dict[str, Any]]) -> None:
    """``settings`` takes those of the recipe, by section."""
    if any("\0" in word for word in words):
        raise UserError("An argument has a NUL character in it, which no path and no setting can have.")
    if words and words[0] in WITH_SETTINGS:
        words, given = _without_settings(words)
        settings.update(given)
    parser, known = make_parser()
    if not words:
        parser.print_help()
        return
    if not words[0].startswith("-") and words[0] not in known:
        raise UserError(f"The command {words[0]!r} is unknown{did_you_mean(words[0], known)}")
    options, rest = parser.parse_known_args(words)
    if rest:
        settings[""] = {_setting_without_section(rest[0], options.command, known[options.command]): None}
    with ended_by_interrupts():
        import torch
    if "TORCH_LOGS" not in os.environ:
        logging.getLogger("torch").setLevel(logging.ERROR)  # it has a handler of its own
    torch.set_flush_denormal(True)  # the process is the command's: numbers below 1e-38 as zero are faster
    options.run(options, settings)


@contextmanager
def _printed_streams() -> Iterator[None]:
    """Let standard output and standard error take all text, and give none that a terminal would obey."""
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if stream is None:  # the caller closed it, so nothing is to be printed
            stream = io.StringIO()
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # rather than end a command that has done its work
        setattr(sys, name, PrintedStream(stream))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _flush() -> None:
    """What a full device does not take is a failure, also of a page of help; the interpreter must not try again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


LACKING = {
    "memory for this: use a smaller model or batch": (
        *("allocate", "bad_alloc", "bad allocation", "out of memory"),
        "could not create a primitive",  # oneDNN
    ),
    "memory or threads for this: raise the limits of the process": ("start new thread", "failed to map segment"),
    "room for open files: raise the limit of the process (`ulimit -n`)": ("Too many open files",),
}
"""What a machine may be short of, and how libraries say so."""


def what_the_machine_lacks(error: BaseException | None) -> str:
    """Of what an error, or one that led to it, says that there was not enough; empty where it is about another.

    A SystemError is Python's own, when a call within it ends without memory and without a reason.
    """
    while error is not None:
        for lack, sayings in LACKING.items():
            if isinstance(error, MemoryError | SystemError) or any(saying in str(error) for saying in sayings):
                return lack
        error = error.__cause__ or error.__context__
    return ""


def _speak_alone() -> None:
    """Show our own messages, and of other packages errors alone: their warnings tell a user of the command nothing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.name.startswith("torchdefine") or record.levelno >= logging.ERROR)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    if not sys.warnoptions:  # python -W and PYTHONWARNINGS ask for them
        warnings.simplefilter("ignore")


def _fail(message: object, code: int) -> NoReturn:
    """Say why the command ends, and end it.

    Under torchrun all processes of a machine refuse the same command, and as soon as one exits, all are ended: the
    first one speaks while the others wait. One that is still there after the wait says its own reason.
    """
    if code == 2 and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_TO_SPEAK)
    with suppress(OSError):
        print(f"torchdefine: {message}", file=sys.stderr)
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    last: Callable[[], str] = str
    """What help shows last, if it takes long imports to know it."""

    def error(self, message: str) -> NoReturn:
        _fail(f"{message[0].upper()}{message[1:]}. See `{self.prog} --help`.", 2)

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse would keep silent where nothing can be written

    def format_help(self) -> str:
        with ended_by_interrupts():
            self.epilog = self.last()
        return super().format_help()


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """The parser of the command line, and those of the commands by their names."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="torchdefine", description=DESCRIPTION, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"torchdefine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(
        name: str, run: Callable[..., None], summary: str, more: str = "", last: Callable[[], str] = str
    ) -> Callable[..., Any]:
        added: _Parser = commands.add_parser(name, help=summary, formatter_class=shape, allow_abbrev=False)
        added.description, added.last = f"{summary}\n\n{more}", last
        added.set_defaults(run=run)
        return added.add_argument

    for room in (recipes, training, runs, inference, completion):
        room.add_commands(command)
    return parser, dict(commands.choices)


def _without_settings(arguments: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """A command line without its settings, and these by section: the parser might take a value for the recipe.

    They are written ``--optim.lr 1e-3``, ``--optim.lr=1e-3``, or ``--unit define``. The recipe checks their names.
    """
    words: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for word in rest:
        if not SETTING.fullmatch(word):
            words.append(word)
            continue
        dotted, given, value = word[2:].partition("=")
        section, dot, name = dotted.partition(".")
        if not given:
            value = next(rest, "")
        if not value or (not given and value.startswith("--")):
            raise UserError(f"The setting --{dotted} needs a value: --{dotted} {'VALUE' if dot else 'KIND'}.")
        if section in NO_SECTIONS:
            raise UserError(f"The setting {dotted!r} is unknown: {section} is no section of a recipe.")
        found.setdefault(section, {})[name or "kind"] = value
    return words, found


def _setting_without_section(word: str, command: str, parser: argparse.ArgumentParser) -> str:
    """The name in ``--lr``, whose section a recipe can tell; whatever else the parser did not know is refused."""
    name = word[2:].partition("=")[0]
    options = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    near = closest(name, [*options, *(WITH_KINDS if command in WITH_SETTINGS else ())])
    if word.startswith("--") and near:
        raise UserError(f"The argument {word!r} is not understood: did you mean --{near}?")
    if not word.startswith("--") or command not in WITH_SETTINGS:
        raise UserError(f"The argument {word!r} is not understood: see `torchdefine {command} --help`.")
    return name
