"""The command that counts parameters."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from torchdefine.cli.shared import Command, data_settings, print_json
from torchdefine.errors import UserError
from torchdefine.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from torchdefine.analysis.parameters import ParameterReport
    from torchdefine.data import TokenizerPair

COUNTING = """  torchdefine params table1a/r3
  torchdefine params table1a/r3 --data my_texts/    with the vocabulary of another text
  torchdefine params runs/first                     a run's model, with its own vocabulary
  torchdefine params demo/adaptive-define --embedding.depth 5 --plan

Settings of the sections data, embedding, context and output change the parameters, and of bitext and transformer
those of a translator: `torchdefine train --help` explains them all."""

OF_THE_VOCABULARY = {"data": {"corpus", "min_count", "max_size", "tokenizer"}, "bitext": {"bpe_size"}}
"""Settings by section that make another vocabulary than the one whose size a recipe or a run states."""


def add_commands(command: Command) -> None:
    """The command that counts parameters."""
    sub = command("params", _params, "Show a recipe's parameters by part, ours beside the paper's.", COUNTING)
    sub.add_argument("recipe", help="a recipe's name, a YAML file, or a run's folder")
    sub.add_argument("--data", help="a folder with text, or a named corpus, whose vocabulary to count with")
    sub.add_argument("--plan", action="store_true", help="print the layers of the unit too")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _params(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.analysis.parameters import print_parameters

    report = _counted(options, overrides)
    if options.json:
        print_json(report.to_dict())
    else:
        print_parameters(report, with_plan=options.plan)


def _counted(options: argparse.Namespace, overrides: dict[str, Any]) -> ParameterReport:
    """A recipe's parameters with the vocabulary of its text or of ``--data``; a run's with its own vocabulary."""
    from torchdefine.analysis.parameters import parameter_report
    from torchdefine.run.tasks import load_tokens
    from torchdefine.training import RunFolder

    folder, data = RunFolder(options.recipe), data_settings(options, overrides.get("data", {}))
    if data:
        overrides["data"] = data
    recipe = load_recipe(folder.config if folder.exists() else options.recipe, overrides)
    if options.data is not None and recipe.task == "translation":
        raise UserError("A translator is counted with bitext.bpe_size subwords, whatever its text: leave --data out.")
    if overrides or (folder.exists() and folder.changes()):  # the published numbers are of another model
        recipe = dataclasses.replace(recipe, published={})
    another = any(overrides.get(section, {}).keys() & names for section, names in OF_THE_VOCABULARY.items())
    if another and "vocabulary_size" not in data:
        return parameter_report(_with_vocabulary_size(recipe, None))
    if "vocabulary_size" in data or not folder.exists():
        return parameter_report(recipe)
    tokens = load_tokens(recipe, folder.path)
    report = parameter_report(_with_vocabulary_size(recipe, len(tokens)))
    counts = report.counts if recipe.task == "language" else _translator_counts(recipe, tokens)
    return dataclasses.replace(report, counts=counts)


def _with_vocabulary_size(recipe: Recipe, size: int | None) -> Recipe:
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, vocabulary_size=size))


def _translator_counts(recipe: Recipe, tokens: TokenizerPair) -> dict[str, int]:
    """Parameters with a vocabulary for each side, which may differ in size."""
    import torch

    from torchdefine.build import VocabularyFacts
    from torchdefine.build_translation import build_translator

    source, target = VocabularyFacts(len(tokens.source)), VocabularyFacts(len(tokens.target))
    with torch.device("meta"):
        return build_translator(recipe, source, target, pad_id=0).parameters_by_part()
