"""Deep factorised token embeddings for PyTorch."""

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

__version__ = "0.1.0"

__all__ = [
    "AdaptiveMap",
    "DeFINE",
    "DefineUnit",
    "GroupLinear",
    "PlanRules",
    "ProjectiveMap",
    "StandardMap",
    "UnitOptions",
    "make_plan",
]
