"""From a run to an export: what is known of the run, without the paths of the machine that it was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.data import licence_of
from torchdefine.export import ExportedFrom, export_model, on_the_cpu
from torchdefine.files import Progress
from torchdefine.modes import evaluating
from torchdefine.recipe import short_name
from torchdefine.run.starting import changed_paths

if TYPE_CHECKING:
    from torchdefine.run.run import Run


def export_run(
    run: Run, folder: str | Path, format: str, licence: str | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Export the model of a run with its vocabulary, settings and result."""
    model = on_the_cpu(run.model)
    exportable = run.exportable(model)
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
    with evaluating(model):
        return export_model(exportable, run.tokenization, about, folder, format, progress)


def _without_paths(recipe: Any) -> Any:
    """Only the last names of files and folders on the training machine, since an export is made to be passed on."""
    return replace(changed_paths(recipe, lambda path: Path(path).name), name=short_name(recipe.name))
