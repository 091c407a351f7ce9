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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from torchdefine import __version__
from torchdefine.cli import (
    ended_by_interrupts,
    exporting,
    inference,
    looking,
    models,
    recipes,
    runs,
    training,
    translation,
)
from torchdefine.errors import MachineError, UserError
from torchdefine.spelling import closest, did_you_mean

SECONDS_TO_SPEAK = 10.0
"""Time for the first process of a machine to say why a command is refused, since it may be later than the others."""
WITH_SETTINGS = ("train", "encode", "params")
"""The commands that take settings of the recipe."""
WITH_KINDS = ("embedding", "unit", "context", "output", "optim", "schedule", "averaging")
"""Sections of which there are several kinds: ``--unit define`` is short for ``--unit.kind define``."""
NO_SECTIONS = ("recipe", "out", "resume", "device", "reporter", "progress", "verbose")
"""Arguments of ``train``."""
SETTING = re.compile(rf"--(\w+\.[\w.]+|{'|'.join(WITH_KINDS)})(=.*)?", re.DOTALL)

DESCRIPTION = """Deep factorised token embeddings: train language models and translators with them, and compare fairly.

  torchdefine recipes                                what there is to train; with a name, its settings
  torchdefine train demo/adaptive-define --out runs/first
  torchdefine eval runs/first
  torchdefine generate runs/first --prompt "The game"
  torchdefine cache runs/first                       then eval, generate, translate and export take --cached
  torchdefine compress runs/first                    many times smaller; then they take --compressed
  torchdefine export runs/first --format onnx --out exported/
  torchdefine translate runs/second < english.txt > german.txt
  torchdefine compare runs/first runs/second
  torchdefine report runs/first runs/second          one HTML file with curves, maps, samples
  torchdefine adapt MODEL_DIR --budget 4MB --text corpus.txt --out smaller/
"""


def run_command(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exits with 1 if it failed and with 2 if it was misused."""
    for name in ("stdout", "stderr"):  # the caller closed them, so nothing is to be printed
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
        _write_all_characters(getattr(sys, name))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        words, settings = _without_settings(sys.argv[1:] if arguments is None else arguments)
        parser, known = _parser()
        if words and not words[0].startswith("-") and words[0] not in known:
            raise UserError(f"The command {words[0]!r} is unknown{did_you_mean(words[0], known)}")
        options, rest = parser.parse_known_args(words)
        overrides = _overrides([*settings, *rest], options.command, known[options.command])
        with ended_by_interrupts():
            import torch

            import torchdefine.recipe  # noqa: F401
        torch.set_flush_denormal(True)  # the process is the command's: numbers below 1e-38 as zero are faster
        options.run(options, overrides)
    except UserError as error:
        _fail(error, 2)
    except MachineError as error:
        _fail(error, 1)
    except BrokenPipeError:  # the reader of our output is gone
        os._exit(1)
    except OSError as error:
        from torchdefine.files import NOT_ALLOWED

        what, where = error.strerror or error, f" ({error.filename})" if error.filename else ""
        if error.errno in NOT_ALLOWED:
            _fail(f"{what}{where}: choose another path, or check its permissions.", 2)
        _fail(f"{what}{where}.", 1)
    except (MemoryError, RuntimeError) as error:
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
        _fail("There is not enough memory for this: use a smaller model or batch.", 1)


def _write_all_characters(stream: TextIO) -> None:
    """Let a stream write what its encoding lacks as \\u2013, say, rather than end a command that has done its work."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def _fail(message: object, code: int) -> NoReturn:
    if code == 2:
        _let_the_first_process_speak()
    print(f"torchdefine: {message}", file=sys.stderr)
    sys.exit(code)


def _let_the_first_process_speak() -> None:
    """Under torchrun all processes of a machine refuse the same command, but only the first needs to say so.

    The others wait: torchrun ends all processes as soon as one exits, so if another exited silently first, nothing
    would be said. A process that is still running after the wait prints its own reason.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_TO_SPEAK)


class _Parser(argparse.ArgumentParser):
    """``texts`` make what help shows before and after the options, if it takes long imports to know it."""

    texts: tuple[Callable[[], str], Callable[[], str]] | None = None

    def error(self, message: str) -> NoReturn:
        _fail(f"{message[0].upper()}{message[1:]}. See `{self.prog} --help`.", 2)

    def format_help(self) -> str:
        if self.texts is not None:
            with ended_by_interrupts():
                self.description, self.epilog = (text() for text in self.texts)
        return super().format_help()


def _parser() -> tuple[argparse.ArgumentParser, dict[str, list[str]]]:
    """The parser of the command line, and the commands' names with their options."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="torchdefine", description=DESCRIPTION, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"torchdefine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(
        name: str,
        run: Callable[..., None],
        summary: str,
        more: str | Callable[[], str] = "",
        last: Callable[[], str] = str,
    ) -> argparse.ArgumentParser:
        added: _Parser = commands.add_parser(name, help=summary, formatter_class=shape, allow_abbrev=False)
        added.texts = (lambda: f"{summary}\n\n{more if isinstance(more, str) else more()}", last)
        added.set_defaults(run=run)
        return added

    for room in (recipes, training, runs, translation, inference, exporting, looking, models):
        room.add_commands(command)
    return parser, {name: list(sub._option_string_actions) for name, sub in commands.choices.items()}


def _without_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without its settings and their values, and these: the parser may mistake one for the recipe."""
    words: list[str] = []
    settings: list[str] = []
    of_a_setting = False
    for word in arguments:
        is_setting = SETTING.fullmatch(word) is not None
        is_value = of_a_setting and not word.startswith("--")
        (settings if is_setting or is_value else words).append(word)
        of_a_setting = is_setting and "=" not in word
    return words, settings


def _overrides(rest: list[str], command: str, options: list[str]) -> dict[str, dict[str, Any]]:
    """The rest of the command line by section: ``--optim.lr 1e-3``, ``--optim.lr=1e-3``, or ``--unit define``.

    Whether a recipe has such a setting is known where it is read; the section of one without any is "".
    """
    found: dict[str, dict[str, Any]] = {}
    words: Iterator[str] = iter(rest)
    for word in words:
        dotted, given, value = word[2:].partition("=")
        is_setting = SETTING.fullmatch(word) is not None
        near = None if is_setting else closest(dotted, [option[2:] for option in options if option.startswith("--")])
        if word.startswith("--") and near:
            raise UserError(f"The argument {word!r} is not understood: did you mean --{near}?")
        if not word.startswith("--") or command not in WITH_SETTINGS:
            raise UserError(f"The argument {word!r} is not understood: see `torchdefine {command} --help`.")
        if not given:
            value = next(words, "")
        section, dot, name = dotted.partition(".") if is_setting else ("", ".", dotted)
        if is_setting and (not value or (not given and value.startswith("--"))):
            raise UserError(f"The setting --{dotted} needs a value: --{dotted} {'VALUE' if dot else 'KIND'}.")
        if section in NO_SECTIONS:
            raise UserError(f"The setting {dotted!r} is unknown: {section} is no section of a recipe.")
        found.setdefault(section, {})[name if dot else "kind"] = value
    return found
