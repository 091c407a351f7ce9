"""Models of the package transformers with DeFINE, or a compact table, as their token table (extra ``hf``).

Once this is imported, transformers loads such models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from torchdefine.adapt.fitted import Fitted
from torchdefine.adapt.model_folder import import_transformers
from torchdefine.adapt.replace import Heads, replace_embeddings
from torchdefine.adapt.stand_in import cache_tables
from torchdefine.adapt.survey import Targets
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound="PreTrainedModel")

__all__ = ["cache_tables", "with_define", "with_table"]

import_transformers()


def with_define(model: Model, targets: Targets = None, **options: Any) -> Model:
    """The model with a fresh DeFINE in place of its token tables, to be trained; it is changed in place.

    It saves by ``save_pretrained``, and after ``import torchdefine.adapt.huggingface`` loads by
    ``AutoModel…from_pretrained``, bit for bit. Without that it is refused. The arguments are those of
    ``replace_embeddings``, which gives a report.
    """
    _check(model)
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
    _check(model)
    given = table.table if isinstance(table, Fitted) else table
    replace_embeddings(model, table=given, targets=targets, heads=heads)
    return model


def _check(model: object) -> None:
    if not isinstance(model, import_transformers().PreTrainedModel):
        raise UserError(
            f"A {type(model).__name__} is no model of transformers: load one by AutoModel.from_pretrained, say, or use "
            "replace_embeddings, which takes any module."
        )
