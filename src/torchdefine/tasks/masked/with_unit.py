"""The class of transformers with a run's small table and unit inside, tied as in the run: it trains on."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchdefine.adapt.huggingface import Adoption
from torchdefine.adapt.stand_in import HeadKind, MapHead
from torchdefine.adapt.survey import choose
from torchdefine.adapt.swap import swap_of
from torchdefine.embedding import DeFINE, DefineUnit, DenseProjection, TokenEmbedding, UnitConfig, finished_table
from torchdefine.errors import UserError
from torchdefine.output.full import compared_with
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.stock import filled, full_softmax
from torchdefine.tasks.masked.text import MaskedTokenizer


@torch.no_grad()
def model_with_unit(model: MaskedModel, tokens: MaskedTokenizer) -> Any:
    """A model of transformers that loads after ``import torchdefine.adapt.huggingface``."""
    define, output, own = as_define(model.embedding), full_softmax(model), None
    table = finished_table(define)  # (V, width): its place is taken below
    if output.own_map is not None:
        own = output.weight  # (V, width)
    made = filled(model, tokens, table, table if own is None else own, tied=own is None)
    adoption, (old,) = Adoption(made), choose(made)
    swap_of(old, define, _kind(model), fresh=False).put_in()
    adoption.complete()
    head = made.get_output_embeddings()
    if isinstance(head, MapHead):
        weight = torch.eye(output.hidden_dim) if output.projection is None else output.projection.weight
        head.projection.weight.copy_(weight)
    return made.eval()


def _kind(model: MaskedModel) -> HeadKind:
    if full_softmax(model).own_map is not None:
        return "own"
    return "vectors" if compared_with(model) else "map"


def as_define(embedding: TokenEmbedding) -> DeFINE:
    """A copy that is saved by its settings; one projection is a unit of one layer."""
    if isinstance(embedding, DeFINE):
        define = copy.deepcopy(embedding)
        define.look_up(None)
        return define
    unit = embedding.unit
    if not isinstance(unit, DenseProjection):
        found = "none" if unit is None else f"a {type(unit).__name__}"
        problem = f"A folder with the unit holds DeFINE or a projection, but this run has {found}"
        raise UserError(f"{problem}: use the format transformers.")
    config = UnitConfig(embedding_dim=unit.out_features, depth=1, weight_scaling=unit.gain != 1.0)
    define = DeFINE.over(copy.deepcopy(embedding.map), unit=config)
    assert isinstance(define.unit, DefineUnit)
    define.unit.last.weight.copy_(unit.weight.T.unsqueeze(0))
    define.row_dropout, define.map_dropout = embedding.row_dropout, embedding.map_dropout
    return define.train(embedding.training)
