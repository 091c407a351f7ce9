"""A drop-in for models that exist: their tables replaced, fitted and distilled."""

from torchdefine.adapt.behaviour import Behaviour
from torchdefine.adapt.budget import Budget
from torchdefine.adapt.distill import Distillation, distill
from torchdefine.adapt.fit import FitOptions, Fitted, Measured, fit
from torchdefine.adapt.unit_fitting import UnitFitting, unit_table

__all__ = [
    "Behaviour",
    "Budget",
    "Distillation",
    "FitOptions",
    "Fitted",
    "Measured",
    "UnitFitting",
    "distill",
    "fit",
    "unit_table",
]
