"""Stored results were written under earlier names of settings; this is the one map from those to today's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchdefine.config import Kinds, to_plain
from torchdefine.embedding import UnitConfig
from torchdefine.embedding.unit_plan import layer_groups
from torchdefine.files import read_json
from torchdefine.recipe import recipe_of
from torchdefine.task import find_task

OF_THE_EMBEDDING = {"map": "kind", "projected_dim": "output_dim"}
OF_THE_UNIT = {"unit": "kind", "equalised": "weight_scaling"}
OF_THE_LOSS = ("output_dropout", "activation_penalty", "temporal_penalty")
LESS_PENALTY = 0.32
"""The temporal penalty of AWD-LSTM with DeFINE, in our settings."""
CHANGED_KINDS = {"kind", "options"}
"""What an old section had beside its settings; an embedding's kind was always "tokens"."""
NOT_AS_PUBLISHED = {
    **dict.fromkeys(("table1a/", "depth-width/", "ablation/"), "-scaled"),
    "ptb/awd-lstm-define": "-adjusted",
}
"""Recipes that had our changes under the paper's names, and how those with such changes end now."""


def read_run(path: Path) -> dict[str, Any]:
    """A stored result, with all settings of its recipe under today's names."""
    result: dict[str, Any] = read_json(path)
    if "settings" in result:
        result["settings"] = settings_of(recipe_of(with_new_names(result["settings"])))
        if "recipe" in result:
            result["recipe"] = recipe_name(result["recipe"], result["settings"])
    return result


def settings_of(recipe: Any) -> dict[str, Any]:
    """All settings of a recipe; those of a unit that its plan decides stand by themselves, as in older results."""
    plain: dict[str, Any] = recipe.to_plain()
    if isinstance(unit := getattr(recipe, "unit", None), UnitConfig):
        planned = unit.planned()
        plain["unit"] = {name: value for name, value in to_plain(planned).items() if name != "plan"}
        plain["unit"]["max_groups"] = max(layer_groups(planned))  # a limit that no layer reaches decides nothing
    return plain


def published_row(name: str) -> str:
    """The recipe of the paper that one of ours changes, by its name."""
    return re.sub("-(scaled|adjusted)$", "", name)


def recipe_name(name: str, settings: Mapping[str, Any]) -> str:
    """Today's name of the recipe that a run had, whose settings are under today's names."""
    changed = settings["embedding"]["scale"] != "none" or settings["unit"].get("weight_scaling", False)
    changed |= settings.get("loss", {}).get("temporal_penalty") == LESS_PENALTY
    ending = next((end for start, end in NOT_AS_PUBLISHED.items() if name.startswith(start)), "")
    return name + ending if changed and not name.endswith(ending) else name


def with_new_names(old: Mapping[str, Any]) -> Mapping[str, Any]:
    """All settings of a recipe under today's names, without those of kinds that were not chosen: they had no effect."""
    if "embedding" not in old:
        return old
    if "unit" in old:  # written after sections were divided
        unit = {OF_THE_UNIT.get(name, name): value for name, value in old["unit"].items()}
        return {**old, "embedding": _scaled(old["embedding"]), "unit": unit, "output": _tied(old["output"])}
    new = {
        **{name: value for name, value in old.items() if not isinstance(value, Mapping) or name == "published"},
        **{name: dict(old[name]) for name in ("data", "schedule", "eval", "beam") if name in old},
        **_embedding_and_unit(old["embedding"]),
        **_context_output_and_loss(old),
        **_optimiser_and_training(old),
    }
    if old.get("task") == "translation":
        _rename_translation(old, new)
    return {name: _with_effect(name, value, new) for name, value in new.items() if _is_read(name, new)}


def _is_read(name: str, new: Mapping[str, Any]) -> bool:
    recipe = find_task(new.get("task", "language")).recipe
    return name in recipe.sections() or name in {f.name for f in dataclasses.fields(recipe)} or name == "task"


def _with_effect(section: str, given: Any, new: Mapping[str, Any]) -> Any:
    """A section without what its kind does not have."""
    of = find_task(new.get("task", "language")).recipe.sections().get(section)
    if of is None:
        return given
    config = of.config(str(given.get("kind", of.default))) if isinstance(of, Kinds) else of
    known = {f.name for f in dataclasses.fields(config)}
    return {name: value for name, value in given.items() if name in known}


def _embedding_and_unit(old: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    embedding = {OF_THE_EMBEDDING.get(name, name): value for name, value in old.items() if name not in CHANGED_KINDS}
    unit = {OF_THE_UNIT.get(name, name): value for name, value in old.items() if name not in CHANGED_KINDS}
    unit.setdefault("kind", "none")
    for name in ("groups", "skip"):  # None meant: as the variant has it
        if unit.get(name, "") is None:
            del unit[name]
    if embedding.get("kind") == "projective":
        embedding["output_dim"] = embedding.get("output_dim") or unit.get("embedding_dim")
    return {"embedding": _scaled(embedding), "unit": unit}


def _scaled(old: Mapping[str, Any]) -> dict[str, Any]:
    """One setting in place of two. The root of the table's width is what gave fresh vectors a mean square of 1."""
    embedding = dict(old)
    if (scaled := embedding.pop("scaled", None)) is None:
        return embedding
    root = embedding["map_dim"] ** 0.5
    usual = embedding.get("init_std") is None and embedding.get("projection_std") is None
    scale = embedding.get("scale") or (("unit-rms" if usual else root) if scaled else "none")
    is_root = scale == (embedding.get("output_dim") or embedding["map_dim"]) ** 0.5
    return {**embedding, "scale": "root-dim" if is_root else scale}


def _tied(old: Mapping[str, Any]) -> dict[str, Any]:
    """It was true for the map's table, which was all that an output could be tied to."""
    given = old.get("tied", True)
    return {**old, "tied": given if isinstance(given, str) else "table" if given else "none"}


def _context_output_and_loss(old: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    context, output = dict(old["context"]), _tied(old["output"])
    moved = OF_THE_LOSS[1:] if context.get("kind") == "transformer-xl" else OF_THE_LOSS
    loss = {name: context.pop(name) for name in moved if name in context}
    loss |= {name: output.pop(name) for name in ("label_smoothing",) if name in output}
    if output.get("kind") == "adaptive" and old["embedding"].get("map", "standard") != "adaptive":
        output["kind"] = "adaptive-table"
    return {"context": context, "output": output, "loss": loss}


def _optimiser_and_training(old: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    optim, train = dict(old["optim"]), dict(old["train"])
    optim["kind"] = optim.pop("optimizer")
    patience = optim.get("stall_patience", 5)
    if "record" in train:
        train["cuda_graphs"] = train.pop("record")
    if train.get("stop_when_stalled"):
        train["early_stopping"] = patience
    averaging = {"kind": optim.get("averaging", "none"), "patience": patience}
    return {"optim": optim, "train": train, "averaging": averaging}


def _rename_translation(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    bitext, transformer = dict(old["bitext"]), dict(old["transformer"])
    new["train"]["batch_tokens"] = bitext.pop("batch_tokens")
    new["data"] |= bitext
    new["source"] = {"share": transformer.get("share", "nothing")}  # none had an embedding of its own
    # It multiplied finished vectors; a table without a unit is the same when its own are multiplied.
    if transformer.pop("scaled", True) and new["unit"]["kind"] == "none":
        new["embedding"]["scale"] = "unit-rms"
    new["context"] = transformer
