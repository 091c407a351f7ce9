"""Models of the package transformers with DeFINE, or a compact table, as their token table (extra ``hf``).

Once this is imported, transformers loads such models. On disk they have a model type that nothing else knows; in
memory they keep their type and class name, so that whatever in transformers depends on these works.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from torchdefine.adapt.fitted import Fitted
from torchdefine.adapt.model_folder import loading_code
from torchdefine.adapt.replace import Heads, replace_embeddings
from torchdefine.adapt.stand_in import StandIn, TiedHead, VectorsHead, cache_tables
from torchdefine.adapt.survey import Targets
from torchdefine.errors import UserError
from torchdefine.files import make_weights_readable_as, write_text
from torchdefine.tables import CompactTable

try:
    import transformers
    from transformers import CONFIG_MAPPING, PreTrainedModel
    from transformers.models.auto import modeling_auto
except ImportError:
    raise UserError("Models of transformers need that package: pip install 'torchdefine[hf]'.") from None

from torchdefine.adapt.pretrained import (
    RECIPE,
    forget_replaced,
    outermost_pretrained,
    rebuild,
    recipe_of,
    resize,
    tied_heads,
    ties_of,
)

__all__ = ["cache_tables", "transformers", "with_define", "with_table"]

MODEL_TYPE = "torchdefine, so write 'import torchdefine.adapt.huggingface' first (pip install 'torchdefine[hf]')"
"""An Auto class without that import shows it, and refuses it."""
HOW_TO_LOAD = (
    "This model has tables of torchdefine: import torchdefine.adapt.huggingface, and load it with an Auto class."
)
GUARD = "transformers_weights"
"""Names a model's file of weights. Every class of transformers opens it, and shows what stands there if it cannot."""
_OF_NAMES = ("_tied_weights_keys", "all_tied_weights_keys", "_tp_plan")
"""Attributes of a model that speak of its modules by name."""
_NOTE = """---
library_name: torchdefine
---

# {architecture} with a compact token table

The token table of this model needs torchdefine (`pip install 'torchdefine[hf]'`). Import it before you load the model:

```python
{code}
```

Without the import, transformers says that the checkpoint "has model type `{model_type}`", and advises to update
transformers. An update does not help. The import does.
"""

Model = TypeVar("Model", bound=nn.Module)


def with_define(model: Model, targets: Targets = None, **options: Any) -> Model:
    """The model with a fresh DeFINE in place of its token tables, to be trained; it is changed in place.

    It is a model of transformers, or holds some, as a ``SentenceTransformer`` does. It saves by ``save_pretrained``,
    and after ``import torchdefine.adapt.huggingface`` loads by ``AutoModel…from_pretrained``, bit for bit. Without that
    it is refused. The arguments are those of ``replace_embeddings``, which gives a report.
    """
    if not any(outermost_pretrained(model)):
        raise UserError(f"A {type(model).__name__} is no model of transformers: use replace_embeddings instead.")
    replace_embeddings(model, targets, **options)
    return model


def with_table(
    model: Model,
    table: Fitted | nn.Module | Mapping[str, nn.Module],
    *,
    targets: Targets = None,
    heads: Heads = "tie",
) -> Model:
    """The model with a table that was fitted to its own: the result of ``fit``, or a module; several by name.

    Like ``with_define`` it changes the model in place, and the model saves and loads.
    """
    return with_define(model, targets, table=table.table if isinstance(table, Fitted) else table, heads=heads)


class TiedToTableError(UserError, AttributeError):
    """A tie of a replaced table cannot be undone. PEFT, which tries to when it merges, goes on at an AttributeError."""


class CompactConfigMixin:
    """A configuration that knows of replaced tables. Mixed in before the configuration's class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tie_word_embeddings" and not value and RECIPE in vars(self) and vars(self).get(name):
            raise TiedToTableError(
                "The output layers of this model go with its replaced table, so tie_word_embeddings cannot be set to "
                "False: set it before the table is replaced, or replace it with heads='untie'."
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _pickled(self, protocol)

    def to_json_file(self, json_file_path: str | PathLike[str], use_diff: bool = True) -> None:
        """Write it so that no class that does not know the tables loads the model, though it may read the settings."""
        settings = json.loads(self.to_json_string(use_diff=use_diff))  # type: ignore[attr-defined]
        settings |= {"model_type": MODEL_TYPE, GUARD: HOW_TO_LOAD}
        write_text(Path(json_file_path), json.dumps(settings, indent=2, sort_keys=True) + "\n")

    @classmethod
    def get_config_dict(cls, *arguments: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the file says, in the model's own terms: PEFT reads it by this class, and not by ``AutoConfig``."""
        settings, unused = super().get_config_dict(*arguments, **options)  # type: ignore[misc]
        return _in_own_terms(settings), unused


class CompactConfig:
    """What ``AutoConfig`` finds under the model type "torchdefine"; it makes a configuration of the model's own."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        settings = _in_own_terms(config_dict)
        own_type = settings["model_type"]
        if own_type not in CONFIG_MAPPING:
            raise UserError(
                f"This model is a {own_type!r} with tables of torchdefine, but this transformers knows no such model: "
                "import what defines it, or use a newer transformers."
            )
        register_compact_classes(CONFIG_MAPPING[own_type])
        return compact_class(CONFIG_MAPPING[own_type]).from_dict(settings, **options)


CONFIG_MAPPING.register(MODEL_TYPE, CompactConfig, exist_ok=True)


def _in_own_terms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they were before ``to_json_file``; those of a model without replaced tables are left as they are."""
    if settings.get("model_type") != MODEL_TYPE:
        return dict(settings)
    own = {name: value for name, value in settings.items() if name != GUARD}
    return {**own, "model_type": settings[RECIPE].get("own_type")}


class CompactMixin:
    """What a model of transformers does differently with replaced tables. Mixed in before the model's class."""

    config: Any

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        recipe = vars(config).pop(RECIPE)
        config.__class__ = vars(self)["config_class"] = type(config).__bases__[1]  # models inside are built plain
        try:
            super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        finally:
            del vars(self)["config_class"]
            _give_recipe(config, recipe)
        _give_recipe(self.config, recipe)
        rebuild(self, recipe)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _pickled(self, protocol)

    def save_pretrained(
        self, save_directory: str | PathLike[str], is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        """As ever; and a note in the folder says how the model is loaded, unless it has a README already."""
        setattr(self.config, RECIPE, recipe_of(self))
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)  # type: ignore[misc]
        folder = Path(save_directory)
        if not is_main_process or not folder.is_dir():
            return
        make_weights_readable_as(folder / transformers.CONFIG_NAME)
        if not (note := folder / "README.md").exists():
            code = loading_code(folder, "path/to/this/folder")
            write_text(note, _NOTE.format(architecture=type(self).__name__, code=code, model_type=MODEL_TYPE))

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        wanted = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(*arguments, output_loading_info=True, **options)  # type: ignore[misc]
        tables = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, StandIn))
        if lost := sorted(key for key in info["missing_keys"] if key.startswith(tables)):
            raise UserError(f"The file of this model has no {lost[0]}, which its table needs: save the model again.")
        recorded, modules = tied_heads(getattr(model.config, RECIPE)), dict(model.named_modules())
        heads = tuple(f"{name}." for name in recorded if name in modules)
        if wrong := sorted(key for key in {*info["missing_keys"], *info["unexpected_keys"]} if key.startswith(heads)):
            raise UserError(f"The file and the model do not agree on {wrong[0]} of a tied output layer: save it again.")
        for table in filter(lambda module: isinstance(module, CompactTable), modules.values()):
            table.requires_grad_(False)  # as it was made: its numbers are packed, many of them in half precision
        return (model, info) if wanted else model

    def get_input_embeddings(self) -> Any:
        found = super().get_input_embeddings()  # type: ignore[misc]
        tied = any(isinstance(module, VectorsHead) for module in self.modules())  # type: ignore[attr-defined]
        if tied and hasattr(found, "token_adapter"):
            raise UserError(
                "The output layer is tied to the table's vectors, where PEFT cannot train single tokens "
                "(trainable_token_indices): replace the table with heads='untie', or name it in modules_to_save."
            )
        return found

    def get_submodule(self, target: str) -> nn.Module:
        """As ever; and PEFT's prompts, which ask for the word table by BERT's name for it, get it from any model."""
        try:
            return super().get_submodule(target)  # type: ignore[misc]
        except AttributeError:
            if target != "embeddings.word_embeddings":
                raise
            found: nn.Module = self.get_input_embeddings()
            return found

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        embedding = self.get_input_embeddings()
        if new_num_tokens is None and pad_to_multiple_of is None:
            return embedding
        plain = type(self).__bases__[1]
        overridden = plain.resize_token_embeddings is not PreTrainedModel.resize_token_embeddings  # type: ignore[attr-defined]
        if overridden and getattr(self, "final_logits_bias", None) is None:
            raise UserError(
                f"A {plain.__name__} resizes more than its table: resize it first, and replace the table then."
            )
        size = embedding.num_embeddings if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        sides = ("vocab_size",) if _own_decoder_table(self) else ("vocab_size", "decoder_vocab_size")
        resize(self, embedding, size, sides, mean_resizing)
        return embedding

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Module:
        if not _own_decoder_table(self):
            return super().resize_decoder_token_embeddings(new_num_tokens)  # type: ignore[misc]
        embedding: nn.Module = self.get_decoder().get_input_embeddings()  # type: ignore[attr-defined]
        resize(self, embedding, new_num_tokens, ("decoder_vocab_size",), True)
        return embedding


def _give_recipe(config: Any, recipe: Any) -> None:
    """Let a configuration know of replaced tables."""
    if not isinstance(config, CompactConfigMixin):
        config.__class__ = compact_class(config.__class__)
    setattr(config, RECIPE, recipe)


def _own_decoder_table(model: Any) -> bool:
    """Whether a decoder has its own vocabulary, as Marian's may."""
    return getattr(model.config, "share_encoder_decoder_embeddings", True) is False


@cache
def compact_class(plain: Any) -> Any:
    """A model's or configuration's class with knowledge of replaced tables.

    It has the plain one's name and module: transformers goes by these to find a tokenizer, to record outputs and to
    convert weights.
    """
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    if not issubclass(plain, PreTrainedModel):
        return type(plain.__name__, (CompactConfigMixin, plain), names)
    return type(plain.__name__, (CompactMixin, plain), {**names, "config_class": compact_class(plain.config_class)})


def _pickled(compact: Any, protocol: Any) -> tuple[Any, ...]:
    """How pickle finds the class of a model or a configuration, which has the name of the plain one."""
    contents = tuple(object.__reduce_ex__(compact, max(int(protocol), 2)))[2:]
    return _empty_compact, (type(compact).__bases__[1],), *contents


def _empty_compact(plain: Any) -> Any:
    compact = compact_class(plain)
    return compact.__new__(compact)


@cache
def register_compact_classes(config_class: Any) -> None:
    """Let every Auto class that knows a configuration know it with replaced tables too."""
    for auto_class in vars(modeling_auto).values():
        mapping = getattr(auto_class, "_model_mapping", None)
        if isinstance(auto_class, type) and mapping is not None and config_class in mapping:
            plain = mapping[config_class]
            compact = tuple(map(compact_class, plain)) if isinstance(plain, tuple) else compact_class(plain)
            mapping.register(compact_class(config_class), compact, exist_ok=True)


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
        self.ties = ties_of(model)
        self.old_attributes = [
            (part, {name: copy.copy(part.__dict__[name]) for name in _OF_NAMES if name in part.__dict__})
            for part, _ in self.ties
        ]

    def complete(self) -> None:
        replaced = [part for part in self.model.modules() if isinstance(part, StandIn | TiedHead)]
        if not replaced:
            return
        forget_replaced(self.ties)
        config = copy.deepcopy(self.old_config)
        self._share_config(self.old_config, config)
        self.model.__class__ = compact_class(self.old_class)
        _give_recipe(config, recipe_of(self.model))
        register_compact_classes(self.old_config.__class__)
        for part in (part for module in replaced for part in module.modules()):
            part._is_hf_initialized = True  # type: ignore[assignment]

    def undo(self) -> None:
        self.model.__class__ = self.old_class
        self._share_config(self.model.config, self.old_config)
        for part, attributes in self.old_attributes:
            for name in _OF_NAMES:
                part.__dict__.pop(name, None)
            part.__dict__.update(attributes)

    def _share_config(self, old: Any, new: Any) -> None:
        """Change the configuration of all parts of the model; another model that shares it keeps the old one."""
        for module in self.model.modules():
            if getattr(module, "config", None) is old:
                module.config = new
