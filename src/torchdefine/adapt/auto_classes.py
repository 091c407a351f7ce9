"""Classes for models of transformers with replaced tables, and their place among the Auto classes.

On disk such a model has the model type "torchdefine", which transformers knows once ``adapt.huggingface`` is imported;
in memory it keeps its old type, so that everything in transformers that depends on the type still works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from torchdefine.errors import UserError
from torchdefine.files import write_text

MODEL_TYPE = "torchdefine"
RECIPE = "torchdefine"
"""The attribute of a configuration that describes the replaced tables."""
HOW_TO_LOAD = (
    "This model has tables of torchdefine: import torchdefine.adapt.huggingface, and load it with an Auto class."
)

NOTE_FILE = "README.md"
_NOTE = """---
library_name: torchdefine
---

# {architecture} with a compact token table

The token table of this model is one of torchdefine, so the model loads only with that package:

```
pip install 'torchdefine[hf]'
```

```python
import torchdefine.adapt.huggingface
from transformers import AutoModel  # or the Auto class for your task; the model was saved as {architecture}

model = AutoModel.from_pretrained("path/to/this/folder")
```

Without that import, transformers says that the checkpoint "has model type `torchdefine` but Transformers does
not recognize this architecture", and advises to update transformers. An update does not help; the import does.
"""


def reduced_to_plain_class(compact: Any, protocol: Any) -> tuple[Any, ...]:
    """How pickle finds the class of a model or a configuration, which has the name of the plain one."""
    contents = tuple(object.__reduce_ex__(compact, max(int(protocol), 2)))[2:]
    _, plain = type(compact).__bases__
    return _empty_compact, (plain,), *contents


class CompactConfigMixin:
    """A configuration that knows of replaced tables. Mixed in before the configuration's class."""

    __reduce_ex__ = reduced_to_plain_class

    def to_json_file(self, json_file_path: str | PathLike[str], use_diff: bool = True) -> None:
        """Write it so that a class that does not know the tables fails at once."""
        settings = json.loads(self.to_json_string(use_diff=use_diff))  # type: ignore[attr-defined]
        settings["model_type"] = MODEL_TYPE
        if "vocab_size" in settings:
            settings[RECIPE]["vocab_size"] = settings["vocab_size"]
            settings["vocab_size"] = HOW_TO_LOAD  # code that expects a whole number refuses it, showing this sentence
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
        from transformers import CONFIG_MAPPING

        settings = _in_own_terms(config_dict)
        own_type = settings["model_type"]
        if own_type not in CONFIG_MAPPING:
            raise UserError(
                f"This model is a {own_type!r} with tables of torchdefine, but this transformers knows no such model: "
                "import what defines it, or use a newer transformers."
            )
        plain = CONFIG_MAPPING[own_type]
        register_compact_classes(plain)
        return compact_config_class(plain).from_dict(settings, **options)


def _in_own_terms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they were before ``to_json_file``; those of a model without replaced tables are left as they are."""
    if settings.get("model_type") != MODEL_TYPE:
        return dict(settings)
    recipe = dict(settings.get(RECIPE) or {})
    own = {"vocab_size": recipe.pop("vocab_size")} if "vocab_size" in recipe else {}
    return {**settings, **own, "model_type": recipe.get("own_type"), RECIPE: recipe}


def _empty_compact(plain: Any) -> Any:
    """An empty object for pickle to fill, of the class that replaces a plain model's or configuration's."""
    from transformers import PreTrainedModel

    compact = compact_model_class(plain) if issubclass(plain, PreTrainedModel) else compact_config_class(plain)
    return compact.__new__(compact)


@cache
def compact_config_class(config_class: Any) -> Any:
    """The configuration's class with knowledge of replaced tables.

    It has the plain one's name and module: transformers goes by these to find a tokenizer, for instance.
    """
    names = {"__module__": config_class.__module__, "__qualname__": config_class.__qualname__}
    return type(config_class.__name__, (CompactConfigMixin, config_class), names)


@cache
def compact_model_class(model_class: Any) -> Any:
    """The model's class with knowledge of replaced tables.

    It has the plain one's name and module: transformers goes by these to record outputs and to convert weights.
    """
    from torchdefine.adapt.pretrained import CompactMixin

    names = {
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "config_class": compact_config_class(model_class.config_class),
    }
    return type(model_class.__name__, (CompactMixin, model_class), names)


@cache
def register_compact_classes(config_class: Any) -> None:
    """Let every Auto class that knows a configuration know it with replaced tables too."""
    from transformers.models.auto import modeling_auto

    for auto_class in vars(modeling_auto).values():
        mapping = getattr(auto_class, "_model_mapping", None)
        if not isinstance(auto_class, type) or mapping is None or config_class not in mapping:
            continue
        plain = mapping[config_class]
        compact = tuple(map(compact_model_class, plain)) if isinstance(plain, tuple) else compact_model_class(plain)
        mapping.register(compact_config_class(config_class), compact, exist_ok=True)


def leave_note(folder: Path, architecture: str) -> None:
    """Say in a saved model's folder how it is loaded, unless the folder has a README already."""
    if folder.is_dir() and not (folder / NOTE_FILE).exists():
        write_text(folder / NOTE_FILE, _NOTE.format(architecture=architecture))
