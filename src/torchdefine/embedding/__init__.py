"""Ids → vectors: plan the unit, map, expand, reduce."""

from torchdefine.config import Kinds
from torchdefine.embedding.adaptive_map import AdaptiveConfig, AdaptiveMap, shrink_cutoffs
from torchdefine.embedding.bag import DeFINEBag
from torchdefine.embedding.define import DeFINE, build_embedding
from torchdefine.embedding.features import Features, previous_ids
from torchdefine.embedding.group_linear import GroupLinear
from torchdefine.embedding.host_map import HostMap
from torchdefine.embedding.map import (
    MapConfig,
    MapLayer,
    ProjectiveConfig,
    ProjectiveMap,
    StandardConfig,
    StandardMap,
    VocabularyFacts,
)
from torchdefine.embedding.slim_map import SlimConfig, SlimMap
from torchdefine.embedding.table import LooksUp, finished_table
from torchdefine.embedding.token_embedding import TokenEmbedding
from torchdefine.embedding.torchrec_map import TorchRecMap
from torchdefine.embedding.unit import DefineUnit, DenseMLP, DenseProjection, MLPConfig, NoUnitConfig, ProjectionConfig
from torchdefine.embedding.unit_plan import VARIANTS, Plan, UnitConfig, make_plan

EMBEDDINGS = Kinds("embedding", StandardConfig, ProjectiveConfig, AdaptiveConfig, SlimConfig)
UNITS = Kinds("unit", NoUnitConfig, ProjectionConfig, MLPConfig)
for _variant, _settings in VARIANTS.items():
    UNITS.register(UnitConfig, _variant, **_settings)
register_embedding = EMBEDDINGS.register
register_unit = UNITS.register

__all__ = [
    "EMBEDDINGS",
    "UNITS",
    "VARIANTS",
    "AdaptiveConfig",
    "AdaptiveMap",
    "DeFINE",
    "DeFINEBag",
    "DefineUnit",
    "DenseMLP",
    "DenseProjection",
    "Features",
    "GroupLinear",
    "HostMap",
    "LooksUp",
    "MLPConfig",
    "MapConfig",
    "MapLayer",
    "NoUnitConfig",
    "Plan",
    "ProjectionConfig",
    "ProjectiveConfig",
    "ProjectiveMap",
    "SlimConfig",
    "SlimMap",
    "StandardConfig",
    "StandardMap",
    "TokenEmbedding",
    "TorchRecMap",
    "UnitConfig",
    "VocabularyFacts",
    "build_embedding",
    "finished_table",
    "make_plan",
    "previous_ids",
    "register_embedding",
    "register_unit",
    "shrink_cutoffs",
]
