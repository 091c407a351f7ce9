"""Recipes: everything that decides how a run turns out, from YAML to the settings of the parts that it names."""

from torchdefine.recipe.recipe import (
    FILE_ENDINGS,
    RUN_SETTINGS_FILE,
    load_recipe,
    merged,
    recipe_names,
    recipe_of,
    recipes_below,
    short_name,
)
from torchdefine.task import FORMAT_VERSION, Recipe
