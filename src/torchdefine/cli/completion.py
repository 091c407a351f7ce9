"""Completion of the command line by bash, zsh and fish: a script that is written from the parser."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from torchdefine.cli.shared import Command
from torchdefine.packing import METHODS

SHELLS = ("bash", "zsh", "fish")
Options = dict[str, tuple[str, list[str]]]
"""The options of a command: what each means, and its values where they can be listed."""
WITH_RECIPES = ("train", "encode", "params", "recipes", "search")
"""The commands whose first argument may be a recipe's name."""

INSTALLING = """  torchdefine completion bash > ~/.local/share/bash-completion/completions/torchdefine
  torchdefine completion zsh > ~/.torchdefine.zsh        and in ~/.zshrc, after compinit: source ~/.torchdefine.zsh
  torchdefine completion fish > ~/.config/fish/completions/torchdefine.fish

  It completes commands, options, recipes and their settings, as in --optim.lr; everything else is a file."""

BASH = """_torchdefine() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
    local command="${COMP_WORDS[1]}" words=""
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="COMMANDS"
    elif [[ "$word" == -* ]]; then
        case "$command" in
OPTIONS
        esac
    else
        case "$command $before" in
VALUES
            *" -"*) ;;
ARGUMENTS
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _torchdefine torchdefine
"""

ZSH = "autoload -U +X bashcompinit && bashcompinit"
"""Lets zsh read the script for bash."""


def add_commands(command: Command) -> None:
    """The command that writes the script."""
    summary = "Print a script that completes torchdefine commands in your shell."
    option = command("completion", _completion, summary, INSTALLING)
    option("shell", choices=SHELLS, help="your shell")


def _completion(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.cli.command_line import WITH_KINDS, WITH_SETTINGS, make_parser
    from torchdefine.recipe import recipe_names

    settings = _settings()
    parts = {f"--{part}": settings[f"--{part}.kind"] for part in WITH_KINDS}
    commands, arguments = dict[str, Options](), dict[str, list[str]]()
    for name, parser in make_parser()[1].items():
        commands[name] = {**settings, **parts} if name in WITH_SETTINGS else {}
        arguments[name] = recipe_names() if name in WITH_RECIPES else []
        for action in parser._actions:
            values = list(map(str, action.choices or ()))
            commands[name] |= {one: (action.help or "", values) for one in action.option_strings if one[:2] == "--"}
            arguments[name] += [] if action.option_strings else values
    commands["compress"]["--method"] = (commands["compress"]["--method"][0], list(METHODS))
    if options.shell == "zsh":
        print(ZSH)
    print("\n".join(_fish(commands, arguments) if options.shell == "fish" else [_bash(commands, arguments)]))


def _settings() -> Options:
    """Every setting of a recipe."""
    from torchdefine.config import Kinds, explain
    from torchdefine.task import find_task, task_names

    found: Options = {}
    for task in task_names():
        for section, of in find_task(task).recipe.sections().items():
            kinds = list(of) if isinstance(of, Kinds) else []
            if isinstance(of, Kinds):
                known = found.get(f"--{section}.kind", ("", []))[1]
                found[f"--{section}.kind"] = (f"Kind of {of.part}.", list(dict.fromkeys([*known, *kinds])))
            for config in map(of.config, kinds) if isinstance(of, Kinds) else [of]:
                found |= {f"--{section}.{name}": (explanation, []) for name, explanation, _ in explain(config)}
    return found


def _bash(commands: dict[str, Options], arguments: dict[str, list[str]]) -> str:
    options = [_case(name, known) for name, known in commands.items()]
    values = [
        _case(f'"{name} {option}"', found)
        for name, known in commands.items()
        for option, (_, found) in known.items()
        if found
    ]
    first = [_case(f'"{name} "*', found) for name, found in arguments.items() if found]
    cases = {"COMMANDS": " ".join(commands), "OPTIONS": options, "VALUES": values, "ARGUMENTS": first}
    script = BASH
    for place, lines in cases.items():
        script = script.replace(place, lines if isinstance(lines, str) else "\n".join(lines))
    return script


def _case(pattern: str, words: Iterable[str]) -> str:
    return f'            {pattern}) words="{" ".join(words)}" ;;'


def _fish(commands: dict[str, Options], arguments: dict[str, list[str]]) -> Iterator[str]:
    yield f"complete -c torchdefine -n __fish_use_subcommand -f -a '{' '.join(commands)}'"
    for name, known in commands.items():
        where = f"complete -c torchdefine -n '__fish_seen_subcommand_from {name}'"
        if arguments[name]:
            yield f"{where} -a '{' '.join(arguments[name])}'"
        for option, (explanation, values) in known.items():
            chosen = f" -x -a '{' '.join(values)}'" if values else ""
            yield f"{where} -l {option[2:]}{chosen} -d {shlex.quote(explanation)}"
