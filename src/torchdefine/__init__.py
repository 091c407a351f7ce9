"""Deep factorised token embeddings for PyTorch."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torchdefine.adapt.replace import ReplacementReport, replace_embeddings, restore
    from torchdefine.context import register_context
    from torchdefine.embedding import (
        AdaptiveMap,
        DeFINE,
        DefineUnit,
        GroupLinear,
        ProjectiveMap,
        StandardMap,
        UnitConfig,
        make_plan,
        register_embedding,
        register_unit,
    )
    from torchdefine.errors import MachineError, UserError
    from torchdefine.output import register_output
    from torchdefine.recipe import load_recipe
    from torchdefine.run import Run, load_run
    from torchdefine.run.train import train
    from torchdefine.task import register_task
    from torchdefine.training import Diverged

__all__ = [
    "AdaptiveMap",
    "DeFINE",
    "DefineUnit",
    "Diverged",
    "GroupLinear",
    "MachineError",
    "ProjectiveMap",
    "ReplacementReport",
    "Run",
    "StandardMap",
    "UnitConfig",
    "UserError",
    "load_recipe",
    "load_run",
    "make_plan",
    "register_context",
    "register_embedding",
    "register_output",
    "register_task",
    "register_unit",
    "replace_embeddings",
    "restore",
    "train",
]

_ROOMS = {
    "adapt.replace": ("ReplacementReport", "replace_embeddings", "restore"),
    "context": ("register_context",),
    "errors": ("MachineError", "UserError"),
    "output": ("register_output",),
    "recipe": ("load_recipe",),
    "run": ("Run", "load_run", "train"),
    "task": ("register_task",),
    "training": ("Diverged",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


if not TYPE_CHECKING:  # a type checker would accept every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        """Names and packages load on first use: torch takes seconds, and the command must stay interruptible."""
        if name in __all__:
            return getattr(import_module(f"{__name__}.{_ROOM_OF.get(name, 'embedding')}"), name)
        if name.isidentifier() and not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__})
