"""Models of transformers whose tables were replaced: their ties, sizes, files, and how they are built again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from torchdefine.adapt.auto_classes import (
    MODEL_TYPE,
    RECIPE,
    CompactConfig,
    compact_config_class,
    compact_model_class,
    leave_note,
    reduced_to_plain_class,
    register_compact_classes,
)
from torchdefine.adapt.heads import TiedHead
from torchdefine.adapt.stand_in import SharedStandIn, StandIn
from torchdefine.adapt.survey import Table, survey
from torchdefine.adapt.swap import put_in, scales_of, swaps_of
from torchdefine.embedding import DeFINE
from torchdefine.embedding.define import FORMAT as DEFINE_FORMAT
from torchdefine.errors import UserError
from torchdefine.tables import CompactTable

RECIPE_VERSION = 1
_TIES = ("_tied_weights_keys", "all_tied_weights_keys")

CONFIG_MAPPING.register(MODEL_TYPE, CompactConfig, exist_ok=True)


class CompactMixin:
    """What a model of transformers does differently with replaced tables. Mixed in before the model's class."""

    __reduce_ex__ = reduced_to_plain_class

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        rebuild(self, getattr(config, RECIPE))

    def save_pretrained(
        self, save_directory: str | PathLike[str], is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        setattr(self.config, RECIPE, recipe_of(self))  # type: ignore[attr-defined]
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)  # type: ignore[misc]
        if is_main_process:
            leave_note(Path(save_directory), type(self).__name__)

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        wanted = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(*arguments, output_loading_info=True, **options)  # type: ignore[misc]
        _refuse_missing(model, info["missing_keys"])
        return (model, info) if wanted else model

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        embedding = self.get_input_embeddings()  # type: ignore[attr-defined]
        if new_num_tokens is None and pad_to_multiple_of is None:
            return embedding
        size = _stand_in(embedding).num_embeddings if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        sides = ("vocab_size",) if _own_decoder_table(self) else ("vocab_size", "decoder_vocab_size")
        resize(self, embedding, size, sides, mean_resizing)
        return embedding

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Module:
        if not _own_decoder_table(self):
            return super().resize_decoder_token_embeddings(new_num_tokens)  # type: ignore[misc]
        embedding = self.get_decoder().get_input_embeddings()  # type: ignore[attr-defined]
        resize(self, embedding, new_num_tokens, ("decoder_vocab_size",), True)
        return embedding


class Adoption:
    """Tells a model of transformers about its new tables, and undoes that.

    Made before the modules are swapped, while the model's ties still have names; call ``complete`` afterwards.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if isinstance(model, CompactMixin):
            raise UserError("The tables of this model were replaced already: restore them first.")
        self.model = model
        self.old_class: Any = type(model)
        self.old_config: Any = model.config
        self.ties = [(part, part.get_expanded_tied_weights_keys(all_submodels=False)) for part in _parts(model)]
        self.old_attributes = [
            (part, {name: copy.copy(part.__dict__[name]) for name in _TIES if name in part.__dict__})
            for part, _ in self.ties
        ]

    def complete(self) -> None:
        if not any(isinstance(module, StandIn) for module in self.model.modules()):
            return
        keep_ties(self.ties)
        config = copy.deepcopy(self.old_config)
        config.__class__ = compact_config_class(self.old_config.__class__)
        self._share_config(self.old_config, config)
        self.model.__class__ = compact_model_class(self.old_class)
        setattr(config, RECIPE, recipe_of(self.model))
        register_compact_classes(self.old_config.__class__)
        for module in self.model.modules():
            if isinstance(module, StandIn | TiedHead):
                for part in module.modules():
                    part._is_hf_initialized = True  # type: ignore[assignment]

    def undo(self) -> None:
        self.model.__class__ = self.old_class
        self._share_config(self.model.config, self.old_config)
        for part, attributes in self.old_attributes:
            for name in _TIES:
                part.__dict__.pop(name, None)
            part.__dict__.update(attributes)

    def _share_config(self, old: Any, new: Any) -> None:
        """Change the configuration of all parts of the model; another model that shares it keeps the old one."""
        for module in self.model.modules():
            if getattr(module, "config", None) is old:
                module.config = new


def rebuild(model: PreTrainedModel, recipe: Mapping[str, Any]) -> None:
    """Give a newly built model the tables that its configuration describes; weights come later."""
    if recipe.get("version") != RECIPE_VERSION:
        raise UserError(
            f"The tables of this model are of version {recipe.get('version')!r}, but this torchdefine reads version "
            f"{RECIPE_VERSION}: use the torchdefine that saved it, or a newer one."
        )
    ties = [(part, part.get_expanded_tied_weights_keys(all_submodels=False)) for part in _parts(model)]
    tables = survey(model, model.all_tied_weights_keys)
    prefix = _prefix(model)
    swaps = []
    for entry in recipe["tables"]:
        name = prefix + entry["name"]
        table = _named_first(tables, name, model)
        scales = scales_of(table, {prefix + place: scale for place, scale in entry["scales"].items()})
        with table.module.weight.device:
            made = table_from_config(entry["table"], entry["dtypes"])
        swaps += swaps_of(table, made, entry["heads"], scales, fresh=not table.module.weight.is_meta)
    put_in(swaps)
    keep_ties(ties)


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
        places = {name: module.scale} | {
            other: shared.scale
            for other, shared in modules.items()
            if isinstance(shared, SharedStandIn) and shared.stand_in is module
        }
        entry = {
            "name": name.removeprefix(prefix),
            "scales": {place.removeprefix(prefix): scale for place, scale in places.items()},
            "heads": module.heads,
            "table": module.table.to_config(),  # type: ignore[operator]
            "dtypes": _own_dtypes(module.table),
        }
        entries.append(entry)
    previous = getattr(model.config, RECIPE, None)
    if previous is not None and {entry["name"] for entry in entries} != {e["name"] for e in previous["tables"]}:
        known = ", ".join(entry["name"] for entry in previous["tables"])
        raise UserError(
            f"This model was given other tables than those that torchdefine knows of ({known}), so it would be saved "
            "wrongly: undo that, or restore the model first."
        )
    return {"version": RECIPE_VERSION, "own_type": model.config.model_type, "tables": entries}


def table_from_config(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> nn.Module:
    """An empty table of the kind that was saved."""
    if config.get("format") == DEFINE_FORMAT:
        return DeFINE.from_config(dict(config))
    table = CompactTable.from_config(config)
    for name, parameter in table.named_parameters():
        if name in dtypes:
            parameter.data = parameter.data.to(getattr(torch, dtypes[name]))
    return table


def _own_dtypes(table: nn.Module) -> dict[str, str]:
    """The dtypes of a compact table's parts, which differ from the model's; the vectors have the model's dtype."""
    if not isinstance(table, CompactTable):
        return {}
    parts = ((name, part) for name, part in table.named_parameters() if part is not table.mean)
    return {name: str(part.dtype).removeprefix("torch.") for name, part in parts}


def keep_ties(ties: list[tuple[PreTrainedModel, dict[str, str]]]) -> None:
    """Keep only the ties whose two ends are still parameters in each part of a model; ours are ties of modules."""
    for part, expanded in ties:
        part._tied_weights_keys = _between_parameters(part, expanded)
        part.all_tied_weights_keys = _between_parameters(part, getattr(part, "all_tied_weights_keys", {}))


def _between_parameters(part: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    names = dict(part.named_parameters(remove_duplicate=False))
    return {target: source for target, source in ties.items() if target in names and source in names}


def resize(model: PreTrainedModel, embedding: nn.Module, size: int, settings: tuple[str, ...], from_mean: bool) -> None:
    """Change the rows of a replaced table and of its output layer; ``settings`` name the configuration's counts."""
    stand_in = _stand_in(embedding)
    old = stand_in.num_embeddings
    stand_in.resize(size, from_mean=from_mean)
    output = model.get_output_embeddings()
    follows = "decoder_vocab_size" in settings
    if isinstance(output, TiedHead) and output.stand_in is stand_in:
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


def outermost_pretrained(model: nn.Module) -> list[PreTrainedModel]:
    """The models of transformers in a module that are not parts of another one."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [found for child in model.children() for found in outermost_pretrained(child)]


def _stand_in(embedding: nn.Module) -> StandIn:
    if isinstance(embedding, StandIn):
        return embedding
    if isinstance(embedding, SharedStandIn):
        return embedding.stand_in
    raise UserError(
        "This table is not among those that were replaced, so torchdefine cannot resize it: restore the model, resize "
        "it, and replace its tables again."
    )


def _own_decoder_table(model: Any) -> bool:
    """Whether a decoder has its own vocabulary, as Marian's may."""
    return getattr(model.config, "share_encoder_decoder_embeddings", True) is False


def _parts(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


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


def _refuse_missing(model: nn.Module, missing: Any) -> None:
    replaced = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, StandIn))
    lost = sorted(key for key in missing if key.startswith(replaced))
    if lost:
        raise UserError(f"The file of this model has no {lost[0]}, which its table needs: save the model again.")
