"""Ids → vectors: plan the unit, map, expand, reduce."""

from torchdefine.embedding.adaptive_map import AdaptiveMap, shrink_cutoffs
from torchdefine.embedding.define import DeFINE
from torchdefine.embedding.dense import DenseMLP, DenseProjection
from torchdefine.embedding.group_linear import GroupLinear
from torchdefine.embedding.map import MapLayer, ProjectiveMap, StandardMap
from torchdefine.embedding.plan import Plan, PlanRules, make_plan
from torchdefine.embedding.table import LooksUp, cached_embedding, finished_table
from torchdefine.embedding.token_embedding import TokenEmbedding
from torchdefine.embedding.unit import VARIANTS, DefineUnit, UnitOptions

__all__ = [
    "VARIANTS",
    "AdaptiveMap",
    "DeFINE",
    "DefineUnit",
    "DenseMLP",
    "DenseProjection",
    "GroupLinear",
    "LooksUp",
    "MapLayer",
    "Plan",
    "PlanRules",
    "ProjectiveMap",
    "StandardMap",
    "TokenEmbedding",
    "UnitOptions",
    "cached_embedding",
    "finished_table",
    "make_plan",
    "shrink_cutoffs",
]
