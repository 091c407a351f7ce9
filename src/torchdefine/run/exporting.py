"""From a run to an export: what is known of the run, without the paths of the machine that it was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.data import licence_of
from torchdefine.export import ExportedFrom, export_model, on_the_cpu
from torchdefine.files import Progress
from torchdefine.recipe import Recipe, short_name
from torchdefine.tasks.language import programs as language
from torchdefine.tasks.translation import programs as translation

if TYPE_CHECKING:
    from torchdefine.run.loaded import Run


def export_run(
    run: Run, folder: str | Path, format: str, licence: str | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Export the model of a run with its vocabulary, settings and result."""
    recipe = _without_paths(run.recipe)
    about = ExportedFrom(
        name=recipe.name,
        description=recipe.description,
        task=recipe.task,
        config=recipe.to_yaml(),
        checkpoint=run.weights.parent.name,
        result=run.result if run.folder.result.exists() else None,
        corpus=recipe.data.corpus,
        data_licence=licence_of(run.recipe.data.corpus),
        licence=licence,
    )
    exportable = translation.exportable if recipe.task == "translation" else language.exportable
    described = exportable(on_the_cpu(run.model), run.tokenization)
    return export_model(described, run.tokenization, about, folder, format, progress)


def _without_paths(recipe: Recipe) -> Recipe:
    """Only the last names of folders and files on the training machine, since an export is made to be passed on."""
    tokenizer, start_from = recipe.data.tokenizer, recipe.train.start_from
    data = replace(
        recipe.data,
        corpus=Path(recipe.data.corpus).name,
        tokenizer=None if tokenizer is None else Path(tokenizer).name,
    )
    train = replace(recipe.train, start_from=None if start_from is None else Path(start_from).name)
    return replace(recipe, name=short_name(recipe.name), data=data, train=train)
