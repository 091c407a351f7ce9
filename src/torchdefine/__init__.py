"""Deep factorised token embeddings for PyTorch."""

__version__ = "0.1.0"

from torchdefine.adapt.import_hook import register_with_transformers
from torchdefine.adapt.replace import ReplacementReport, replace_embeddings, restore
from torchdefine.build import register_context, register_embedding, register_output
from torchdefine.embedding import (
    AdaptiveMap,
    DeFINE,
    DefineUnit,
    GroupLinear,
    PlanRules,
    ProjectiveMap,
    StandardMap,
    UnitOptions,
    make_plan,
)
from torchdefine.run import Run, load_run, train

__all__ = [
    "AdaptiveMap",
    "DeFINE",
    "DefineUnit",
    "GroupLinear",
    "PlanRules",
    "ProjectiveMap",
    "ReplacementReport",
    "Run",
    "StandardMap",
    "UnitOptions",
    "load_run",
    "make_plan",
    "register_context",
    "register_embedding",
    "register_output",
    "replace_embeddings",
    "restore",
    "train",
]

register_with_transformers()
