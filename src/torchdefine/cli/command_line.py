"""The commands and their settings, parsed; every failure ends in one sentence and an exit code."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from torchdefine import __version__
from torchdefine.cli import counting, exporting, inference, looking, models, recipes, runs, translation
from torchdefine.errors import MachineError, UserError
from torchdefine.files import NOT_ALLOWED
from torchdefine.recipe import SECTIONS, Recipe
from torchdefine.recipe.settings import explain
from torchdefine.spelling import closest, did_you_mean, did_you_mean_setting

SECONDS_TO_SPEAK = 10.0
"""Time for the first process of a machine to say why a command is refused, since it may be later than the others."""

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
        options.run(options, overrides)
    except UserError as error:
        _fail(error, 2)
    except MachineError as error:
        _fail(error, 1)
    except BrokenPipeError:  # the reader of our output is gone
        os._exit(1)
    except OSError as error:
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
    def error(self, message: str) -> NoReturn:
        _fail(f"{message[0].upper()}{message[1:]}. See `{self.prog} --help`.", 2)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, list[str]]]:
    """The parser of the command line, and the commands' names with their options."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="torchdefine", description=DESCRIPTION, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"torchdefine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(
        name: str, run: Callable[..., None], summary: str, more: str = "", last: str = ""
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name,
            help=summary,
            description=f"{summary}\n\n{more}",
            epilog=last,
            formatter_class=shape,
            allow_abbrev=False,
        )
        added.set_defaults(run=run)
        return added

    for room in (recipes, counting, runs, translation, inference, exporting, looking, models):
        room.add_commands(command)
    return parser, {name: list(sub._option_string_actions) for name, sub in commands.choices.items()}


def _without_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without its ``--SECTION.NAME VALUE``, and these: the parser may mistake a value for the recipe."""
    words: list[str] = []
    settings: list[str] = []
    of_a_setting = False
    for word in arguments:
        is_setting = re.fullmatch(r"--\w+\.[\w.]+(=.*)?", word, re.DOTALL) is not None
        is_value = of_a_setting and not word.startswith("--")
        (settings if is_setting or is_value else words).append(word)
        of_a_setting = is_setting and "=" not in word
    return words, settings


def _overrides(rest: list[str], command: str, options: list[str]) -> dict[str, dict[str, Any]]:
    """The rest of the command line, ``--optim.lr 1e-3`` or ``--optim.lr=1e-3``, by section."""
    found: dict[str, dict[str, Any]] = {}
    names = [name for name, _, _ in explain(Recipe)]
    words = iter(rest)
    for word in words:
        dotted, given, value = word[2:].partition("=")
        is_setting = any(name.endswith(f".{dotted}") for name in names) or "." in dotted
        near = None if is_setting else closest(dotted, [option[2:] for option in options if option.startswith("--")])
        if word.startswith("--") and near:
            raise UserError(f"The argument {word!r} is not understood: did you mean --{near}?")
        if not word.startswith("--") or command not in ("train", "encode", "params"):
            raise UserError(f"The argument {word!r} is not understood: see `torchdefine {command} --help`.")
        if dotted not in names:
            raise UserError(f"The setting --{dotted} is unknown{did_you_mean_setting(dotted, names)}")
        if not given:
            value = next(words, "")
            if not value or value.startswith("--"):
                raise UserError(f"The setting --{dotted} needs a value: --{dotted} VALUE.")
        section, name = dotted.split(".", 1)
        found.setdefault(section, {})[name] = value
    assert all(section in SECTIONS for section in found)
    return found
