"""Fine-tuning: a run that starts from another run's best weights."""

from __future__ import annotations

from typing import Any

from torchdefine.data.tokenizer import TOKENIZER_FILE
from torchdefine.errors import UserError
from torchdefine.run.checkpoint_file import read_checkpoint
from torchdefine.run.folder import RunFolder
from torchdefine.run.starting import differences
from torchdefine.training.checkpoint import load_weights

MOST_SETTINGS_NAMED = 4


def take_weights(model: Any, recipe: Any, folder: RunFolder) -> None:
    """Load the weights that ``train.start_from`` names; the vocabulary must be this run's, the text need not be."""
    other = RunFolder(recipe.train.start_from)
    if not other.path.exists():
        raise UserError(f"train.start_from names {other.path}, but there is no such folder: name a run's folder.")
    if not other.best.exists():
        raise UserError(f"train.start_from {other.path} has no best weights: name a run's folder.")
    weights = read_checkpoint(other.best, only="model")
    if weights.facts.get("vocabulary_sha256") != folder.fingerprints["vocabulary_sha256"]:
        raise UserError(f"train.start_from {other.path} has another vocabulary: {_how_to_share_a_vocabulary(other)}.")
    try:
        load_weights(model, weights, other.best)
    except UserError:
        trained = other.recipe()
        raise UserError(
            f"train.start_from {other.path} is a model of {trained.name}, whose weights do not fit into one of "
            f"{recipe.name}{_where_models_differ(trained, recipe)}: start from a run with the same model."
        ) from None


def _how_to_share_a_vocabulary(run: RunFolder) -> str:
    tokenizer = run.path / TOKENIZER_FILE
    if tokenizer.is_file():
        return f"set data.tokenizer to {tokenizer}, which it was trained with"
    return "the words of another text are another vocabulary, so give both runs one tokenizer by data.tokenizer"


def _where_models_differ(one: Any, other: Any) -> str:
    """Some settings in brackets; nothing where it is not the settings."""
    parts = ("task", "embedding", "unit", "source", "context", "output")
    found = [place for place, _, _ in differences(one.to_plain(), other.to_plain()) if place.split(".")[0] in parts]
    more = f" and {len(found) - MOST_SETTINGS_NAMED} more" if len(found) > MOST_SETTINGS_NAMED else ""
    return f" (they differ in {', '.join(found[:MOST_SETTINGS_NAMED])}{more})" if found else ""
