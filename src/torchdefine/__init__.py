"""Small token tables for PyTorch models: made before training or after, and measured."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"

if TYPE_CHECKING:  # "as" tells type checkers that a name is meant for others
    from torchdefine.adapt.replace import ReplacementReport as ReplacementReport
    from torchdefine.adapt.replace import replace_embeddings as replace_embeddings
    from torchdefine.adapt.replace import restore as restore
    from torchdefine.context import register_context as register_context
    from torchdefine.embedding import AdaptiveMap as AdaptiveMap
    from torchdefine.embedding import DeFINE as DeFINE
    from torchdefine.embedding import DeFINEBag as DeFINEBag
    from torchdefine.embedding import DefineUnit as DefineUnit
    from torchdefine.embedding import GroupLinear as GroupLinear
    from torchdefine.embedding import HostMap as HostMap
    from torchdefine.embedding import ProjectiveMap as ProjectiveMap
    from torchdefine.embedding import SlimMap as SlimMap
    from torchdefine.embedding import StandardMap as StandardMap
    from torchdefine.embedding import TorchRecMap as TorchRecMap
    from torchdefine.embedding import UnitConfig as UnitConfig
    from torchdefine.embedding import make_plan as make_plan
    from torchdefine.embedding import register_embedding as register_embedding
    from torchdefine.embedding import register_unit as register_unit
    from torchdefine.errors import MachineError as MachineError
    from torchdefine.errors import UserError as UserError
    from torchdefine.output import register_output as register_output
    from torchdefine.recipe import load_recipe as load_recipe
    from torchdefine.run import Run as Run
    from torchdefine.run import load_run as load_run
    from torchdefine.run.train import train as train
    from torchdefine.task import register_task as register_task
    from torchdefine.training import Diverged as Diverged

_ROOM_OF = {
    **dict.fromkeys(("AdaptiveMap", "HostMap", "ProjectiveMap", "SlimMap", "StandardMap", "TorchRecMap"), "embedding"),
    **dict.fromkeys(("DeFINE", "DeFINEBag", "DefineUnit", "GroupLinear"), "embedding"),
    **dict.fromkeys(("UnitConfig", "make_plan", "register_embedding", "register_unit"), "embedding"),
    **dict.fromkeys(("ReplacementReport", "replace_embeddings", "restore"), "adapt.replace"),
    **dict.fromkeys(("MachineError", "UserError"), "errors"),
    **dict.fromkeys(("Run", "load_run", "train"), "run"),
    "Diverged": "training",
    "load_recipe": "recipe",
    "register_context": "context",
    "register_output": "output",
    "register_task": "task",
}
__all__ = list(_ROOM_OF)


if not TYPE_CHECKING:  # a type checker would accept every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        """Names and packages load on first use: torch takes seconds, and the command must stay interruptible."""
        if name in _ROOM_OF:
            return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
        if name.isidentifier() and not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__})
