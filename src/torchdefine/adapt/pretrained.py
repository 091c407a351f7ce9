"""The tables of a model of transformers: described in its configuration, built again from that, tied and resized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from torchdefine import __version__
from torchdefine.adapt.stand_in import Face, SharedStandIn, StandIn, TiedHead
from torchdefine.adapt.survey import Table, survey
from torchdefine.adapt.swap import swap_of
from torchdefine.embedding import DeFINE
from torchdefine.embedding.define import FORMAT as DEFINE_FORMAT
from torchdefine.errors import UserError
from torchdefine.tables import CompactTable

RECIPE = "torchdefine"
"""The attribute of a configuration that describes the replaced tables."""
RECIPE_VERSION = 2

_LESS_USUAL = ("AutoModelForMaskedLM", "AutoModelForTextEncoding", "AutoModelForPreTraining")
"""Auto classes that load some models which another one loads too."""

Ties = list[tuple[PreTrainedModel, dict[str, str]]]
"""Of each part of a model that may have its own."""


def recipe_of(model: PreTrainedModel) -> dict[str, Any]:
    """What ``rebuild`` needs, read from the model as it is now; names are relative to the base model."""
    prefix = _prefix(model)
    modules = dict(model.named_modules())
    entries = []
    for name, module in modules.items():
        if not isinstance(module, StandIn):
            continue
        if not name.startswith(prefix):
            raise UserError(f"The table {name} lies outside the base model {prefix[:-1]}, where it could not be saved.")
        scales = {
            place.removeprefix(prefix): other.scale
            for place, other in modules.items()
            if other is module or (isinstance(other, SharedStandIn) and other.stand_in is module)
        }
        own_dtypes = {  # they may differ from the model's, which the vectors have
            part: str(parameter.dtype).removeprefix("torch.")
            for part, parameter in module.table.named_parameters()
            if isinstance(module.table, CompactTable) and parameter is not module.table.mean
        }
        config = module.table.to_config()  # type: ignore[operator]
        tied = [head for head, other in modules.items() if isinstance(other, TiedHead) and other.stand_in is module]
        entry = {"name": name.removeprefix(prefix), "scales": scales, "heads": module.heads, "tied": tied}
        entries.append({**entry, "table": config, "dtypes": own_dtypes})
    known = [entry["name"] for entry in (getattr(model.config, RECIPE, None) or {"tables": entries})["tables"]]
    if {entry["name"] for entry in entries} != set(known):
        raise UserError(
            f"This model was given other tables than those that torchdefine knows of ({', '.join(known)}), so it "
            "would be saved wrongly: undo that, or restore the model first."
        )
    for name, module in modules.items():
        if isinstance(module, TiedHead | SharedStandIn) and module.stand_in not in modules.values():
            raise UserError(f"{name} uses a table that is no longer in this model, so it would be saved wrongly.")
    versions = {"version": RECIPE_VERSION, "torchdefine_version": __version__}
    return {**versions, "own_type": model.config.model_type, "tables": entries}


def tied_heads(recipe: Mapping[str, Any] | None) -> list[str]:
    """The output layers that were tied to tables when a recipe was read, by name."""
    return [name for entry in recipe["tables"] for name in entry["tied"]] if recipe else []


def rebuild(model: PreTrainedModel, recipe: Mapping[str, Any]) -> None:
    """Give a newly built model the tables that its configuration describes; weights come later."""
    if recipe.get("version") != RECIPE_VERSION:
        raise UserError(
            f"The tables of this model are of version {recipe.get('version')!r}, but this torchdefine reads "
            f"{RECIPE_VERSION}: use the one that saved it, or a newer one."
        )
    ties, prefix = ties_of(model), _prefix(model)
    tables = survey(model, model.all_tied_weights_keys)
    swaps = []
    for entry in recipe["tables"]:
        table = _named_first(tables, prefix + entry["name"], model)
        with table.module.weight.device:
            made = _empty_table(entry["table"], entry["dtypes"])
        scales = {prefix + place: scale for place, scale in entry["scales"].items()}
        swaps.append(swap_of(table, made, entry["heads"], fresh=True, scales=scales))
    for swap in swaps:
        swap.put_in()
        for part in swap.new[0].modules():  # its numbers come from a file, or are drawn already
            part._is_hf_initialized = True  # type: ignore[assignment]
    forget_replaced(ties)


def _prefix(model: PreTrainedModel) -> str:
    """The prefix of the base model's names in this model; it differs between models on the same base."""
    prefix = model.base_model_prefix
    return f"{prefix}." if prefix and hasattr(model, prefix) else ""


def _named_first(tables: list[Table], name: str, model: nn.Module) -> Table:
    """The table that has a place of that name, which becomes its first."""
    for table in tables:
        places = sorted(table.places, key=lambda place: place.name != name)
        if places[0].name == name:
            return Table(tuple(places), table.heads, table.problem)
    raise UserError(f"A {type(model).__name__} has no table {name}, so this model cannot be loaded as one.")


def _empty_table(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> nn.Module:
    """A table of the kind that was saved."""
    if config.get("format") == DEFINE_FORMAT:
        return DeFINE.from_config(dict(config))
    table = CompactTable.from_config(config)
    for name, parameter in table.named_parameters():
        if name in dtypes:
            parameter.data = parameter.data.to(getattr(torch, dtypes[name]))
    return table


def ties_of(model: PreTrainedModel) -> Ties:
    """What is tied in each part of a model, by name, before tables are swapped."""
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return [(part, part.get_expanded_tied_weights_keys(all_submodels=False)) for part in parts]


def forget_replaced(ties: Ties) -> None:
    """Keep only the ties whose two ends are still parameters in each part of a model; ours are ties of modules.

    A plan for tensor parallelism keeps no replaced module: these stand whole on every device.
    """
    for part, expanded in ties:
        replaced = {name for name, module in part.named_modules() if isinstance(module, Face | TiedHead)}
        if plan := vars(part).get("_tp_plan"):
            part._tp_plan = {name: style for name, style in plan.items() if name not in replaced}
        names = dict(part.named_parameters(remove_duplicate=False))
        known = {"_tied_weights_keys": expanded, "all_tied_weights_keys": getattr(part, "all_tied_weights_keys", {})}
        for attribute, tied in known.items():
            if getattr(part, attribute, None):  # a model that ties nothing may have none
                kept = {target: source for target, source in tied.items() if target in names and source in names}
                setattr(part, attribute, kept)


def resize(model: PreTrainedModel, embedding: nn.Module, size: int, settings: tuple[str, ...], from_mean: bool) -> None:
    """Change the rows of a replaced table and of its output layer; ``settings`` name the configuration's counts."""
    if not isinstance(embedding, StandIn | SharedStandIn):
        raise UserError("This table was not replaced: restore the model, resize it, and replace its tables again.")
    old = embedding.num_embeddings
    embedding.stand_in.resize(size, from_mean=from_mean)
    output = model.get_output_embeddings()
    follows = "decoder_vocab_size" in settings
    if isinstance(output, TiedHead) and output.stand_in is embedding.stand_in:
        output.follow_resize()
        model.set_output_embeddings(output)
    elif follows and isinstance(output, nn.Linear) and output.out_features == old:
        resized = model._get_resized_lm_head(output, size, mean_resizing=from_mean)
        model.set_output_embeddings(resized.requires_grad_(output.weight.requires_grad))
        if resized.bias is not None:  # some models now share it, though they are not tied; ties come back below
            resized.bias = nn.Parameter(resized.bias.detach().clone(), resized.bias.requires_grad)
    if follows and getattr(model, "final_logits_bias", None) is not None:
        model._resize_final_logits_bias(size)
    config = model.config.get_text_config()
    for setting in settings:
        if hasattr(config, setting):
            setattr(config, setting, size)
    if "vocab_size" in settings and hasattr(model, "vocab_size"):
        model.vocab_size = size
    setattr(model.config, RECIPE, recipe_of(model))
    model.tie_weights()


def outermost_pretrained(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The models of transformers in a module that are not parts of another one."""
    if isinstance(model, PreTrainedModel):
        yield model
    else:
        for child in model.children():
            yield from outermost_pretrained(child)


def auto_classes(plain: Any) -> list[str]:
    """The Auto classes that load a class of models, the most usual first."""
    names = []
    for name, auto_class in vars(modeling_auto).items():
        mapping = getattr(auto_class, "_model_mapping", None)
        if isinstance(auto_class, type) and mapping is not None and plain.config_class in mapping:
            found = mapping[plain.config_class]
            if plain in (found if isinstance(found, tuple) else (found,)):
                names.append(name)
    return sorted(names, key=lambda name: (name in _LESS_USUAL and _LESS_USUAL.index(name) + 1, name))
