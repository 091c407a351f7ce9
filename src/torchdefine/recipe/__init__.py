"""Everything that decides how a run turns out: sections of settings, their YAML, and which have an effect."""

from torchdefine.recipe.recipe import (
    FILE_ENDINGS,
    FORMAT_VERSION,
    RUN_SETTINGS_FILE,
    SECTIONS,
    Recipe,
    for_five_validations,
    load_recipe,
    recipe_names,
    recipes_below,
    short_name,
)
from torchdefine.recipe.sections import (
    ContextSettings,
    DataSettings,
    EmbeddingSettings,
    OptimSettings,
    OutputSettings,
    ScheduleSettings,
    TrainSettings,
)

__all__ = [
    "FILE_ENDINGS",
    "FORMAT_VERSION",
    "RUN_SETTINGS_FILE",
    "SECTIONS",
    "ContextSettings",
    "DataSettings",
    "EmbeddingSettings",
    "OptimSettings",
    "OutputSettings",
    "Recipe",
    "ScheduleSettings",
    "TrainSettings",
    "for_five_validations",
    "load_recipe",
    "recipe_names",
    "recipes_below",
    "short_name",
]
