"""One recipe as a page: YAML that `train` reads as a file, with settings left at their defaults as comments."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from torchdefine.recipe import FORMAT_VERSION, Recipe
from torchdefine.recipe.effects import settings_without_effect
from torchdefine.recipe.settings import to_plain

COMMENTS_FROM = 44
"""Column of the defaults beside settings that differ from them."""


def recipe_page(recipe: Recipe) -> str:
    """The resolved recipe: settings that differ from the defaults are set, others that have an effect are comments."""
    without_effect = settings_without_effect(recipe)
    lines = [f"# {recipe.name}", *_published(recipe), f"format_version: {FORMAT_VERSION}"]
    lines += [_setting("description", recipe.description), _setting("task", recipe.task)]
    lines.append("# What differs from its default comes first in every section; comments have the rest that matters.")
    for section in recipe.used_sections():
        settings = getattr(recipe, section)
        differing = changed_settings(settings)
        default = [
            f
            for f in dataclasses.fields(settings)
            if f.name not in differing and f"{section}.{f.name}" not in without_effect
        ]
        if differing or default:
            lines += ["", f"{section}:" if differing else f"# {section}:"]
        for f in dataclasses.fields(settings):
            if f.name in differing:
                shown = _setting(f.name, differing[f.name])
                lines.append(f"  {shown:<{COMMENTS_FROM}} # default {_value(_default(f))}")
        lines += [f"{'  # ' if differing else '#   '}{_setting(f.name, _default(f))}" for f in default]
    return "\n".join(lines)


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """The same for programs."""
    sections = {section: to_plain(getattr(recipe, section)) for section in recipe.used_sections()}
    differing = {section: changed_settings(getattr(recipe, section)) for section in sections}
    return {
        "name": recipe.name,
        "description": recipe.description,
        "task": recipe.task,
        "published": recipe.published,
        "settings": sections,
        "differing": {section: values for section, values in differing.items() if values},
    }


def changed_settings(settings: Any) -> dict[str, Any]:
    """The settings of a section that have another value than their default, as plain values."""
    return {
        f.name: _plain(getattr(settings, f.name))
        for f in dataclasses.fields(settings)
        if _plain(getattr(settings, f.name)) != _default(f)
    }


def _default(f: dataclasses.Field[Any]) -> Any:
    return _plain(f.default if f.default is not dataclasses.MISSING else {})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _published(recipe: Recipe) -> list[str]:
    if not recipe.published:
        return []
    shown = ", ".join(f"{name.replace('_', ' ')} {number:g}" for name, number in recipe.published.items())
    return [f"# Published, parameters in millions: {shown}"]


def _setting(name: str, value: Any) -> str:
    return f"{name}: {_value(value)}"


def _value(value: Any) -> str:
    """A value as YAML in one line."""
    several = isinstance(value, list | dict)
    dumped = yaml.safe_dump(value if several else [value], default_flow_style=several, allow_unicode=True, width=10**6)
    return dumped.strip().removeprefix("- ")
