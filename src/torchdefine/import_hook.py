"""Tell transformers about models with replaced tables, as soon as it is imported and without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRY = "transformers.models.auto.configuration_auto"
"""The module of transformers that keeps the model types; every Auto class imports it."""


def register_with_transformers() -> None:
    """Register the model type "torchdefine": now if transformers is imported, else when it is."""
    if REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(REGISTRY, _register))


def _register() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from torchdefine.adapt.auto_classes import MODEL_TYPE, CompactConfig

    CONFIG_MAPPING.register(MODEL_TYPE, CompactConfig, exist_ok=True)


class _AfterImport:
    """Finds nothing itself: other finders find the module, and ``then`` is called once it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then, self.asking_others = name, then, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name or self.asking_others:
            return None
        self.asking_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking_others = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_register(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            self.then()

        spec.loader.exec_module = execute_then_register  # type: ignore[method-assign]
        return spec
