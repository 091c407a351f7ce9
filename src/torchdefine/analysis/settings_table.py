"""The settings in which runs differ, as far as they have an effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdefine.recipe import SECTIONS, Recipe
from torchdefine.recipe.effects import implied_settings, settings_without_effect
from torchdefine.recipe.settings import to_plain

NO_EFFECT = "–"


def differing_settings(recipes: Sequence[Recipe], *, only_chosen: bool = False) -> list[list[str]]:
    """A row for each: its name, and its value in every recipe, or a dash where it has no effect.

    A setting that is left open has the value that follows from others, where that is known. What only some of the
    recipes use is left out where these leave it at its default. Of what all leave open, only widths are shown, and
    with ``only_chosen`` nothing.
    """
    settings = [_with_effect(recipe) for recipe in recipes]
    effective = [
        {name: implied.get(name, value) for name, value in one.items()}
        for one, implied in zip(settings, map(implied_settings, recipes), strict=True)
    ]
    default = _flatten({section: to_plain(getattr(Recipe(), section)) for section in SECTIONS})
    rows = []
    for name in dict.fromkeys(name for one in settings for name in one):
        values = [one[name] for one in effective if name in one]
        chosen = any(one[name] != default.get(name) for one in settings if name in one)
        differ = any(value != values[0] for value in values) or len(values) < len(settings)
        follows = len(values) == len(settings) and name.endswith("_dim") and not only_chosen
        if differ and (chosen or follows):
            rows.append([name, *(str(one.get(name, NO_EFFECT)) for one in effective)])
    return rows


def _with_effect(recipe: Recipe) -> dict[str, Any]:
    """All settings that have an effect by dotted name; those that are None by default and in the recipe, too."""
    unused = settings_without_effect(recipe)
    sections = {section: vars(getattr(recipe, section)) for section in recipe.used_sections()}
    plain = _flatten(sections)
    return {"task": recipe.task, **{name: value for name, value in plain.items() if name not in unused}}


def _flatten(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{name}": list(value) if isinstance(value, tuple) else value
        for section, values in sections.items()
        for name, value in values.items()
    }
