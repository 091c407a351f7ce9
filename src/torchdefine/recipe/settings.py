"""Typed settings: dataclasses whose fields explain themselves, read strictly from YAML or the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from torchdefine.errors import UserError
from torchdefine.spelling import did_you_mean

S = TypeVar("S")


def setting(default: Any, explanation: str) -> Any:
    """A dataclass field with the sentence that ``--help`` prints for it."""
    metadata = {"help": explanation}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require_settings(value: Any, place: str) -> None:
    """Refuse a value in the place of several settings."""
    if not isinstance(value, Mapping):
        raise UserError(f"{place} holds several settings, so it cannot be {value!r}: use {place}.NAME.")


def read_settings(kind: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Build a dataclass from plain values; unknown names and wrong types are refused with their place."""
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        place = f"{where}.{name}" if where else str(name)
        if name not in known:
            raise UserError(f"The setting {place!r} is unknown{did_you_mean(str(name), known)}")
        if dataclasses.is_dataclass(hints[name]):
            require_settings(value, place)
            arguments[name] = read_settings(typing.cast(type, hints[name]), value, place)
        else:
            arguments[name] = convert(hints[name], value, place)
    return kind(**arguments)


def convert(kind: Any, value: Any, place: str) -> Any:
    """Turn a value into what a field declares; it may be text, as on a command line or as YAML reads 3e-4."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = _without_none(kind)
        # "none" is an ordinary choice where a setting has one of that name; null always means None.
        nothing = ("null",) if "none" in get_args(inner) else ("none", "null")
        if value is None or (isinstance(value, str) and value.lower() in nothing):
            return None
        return convert(inner, value, place)
    if origin is Literal:
        if value not in get_args(kind):
            raise UserError(f"{place} is {value!r}, but must be one of {', '.join(map(str, get_args(kind)))}.")
        return value
    if origin is tuple:
        if isinstance(value, str):
            value = [item.strip() for item in value.strip("[]() ").split(",") if item.strip()]
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(convert(get_args(kind)[0], item, place) for item in items)
    if origin is dict:
        return _convert_mapping(kind, value, place)
    return _convert_plain(kind, value, place)


def _without_none(kind: Any) -> Any:
    """The kind of a setting that may also be None, and any other kind as it is."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    (inner,) = [k for k in get_args(kind) if k is not type(None)]
    return inner


def _convert_mapping(kind: Any, value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            value = None
    if not isinstance(value, Mapping):
        raise UserError(f"{place} must be a mapping of names to values, such as {{width: 12}}.")
    if _holds_itself(value):
        raise UserError(f"{place} holds itself by an alias: write its values out.")
    inner = get_args(kind)[1]
    plain = inner in (int, float, str, bool)
    return {str(name): convert(inner, item, f"{place}.{name}") if plain else item for name, item in value.items()}


def _holds_itself(value: Any) -> bool:
    """Whether there is no end to a value, as an alias to itself makes it in YAML."""
    try:
        json.dumps(value, default=str, skipkeys=True)
    except ValueError:
        return True
    return False


def _convert_plain(kind: type, value: Any, place: str) -> Any:
    if kind is bool:
        known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in known:
            return known[value.lower()]
    elif kind is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            if kind is int and _is_whole(value):
                return int(value)  # a float would round the digits beyond its sixteenth
            number = float(value)
            if kind is float and math.isfinite(number):
                return number
            if kind is int and number == int(number):
                return int(number)
        except (ValueError, OverflowError):
            pass
    wanted = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}[kind]
    raise UserError(f"{place} is {value!r}, but must be {wanted}.")


def _is_whole(value: str | int | float) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal())


def to_plain(settings: Any) -> dict[str, Any]:
    """Settings as plain values for YAML or JSON; tuples become lists."""
    return {
        f.name: _plain(value)
        for f in dataclasses.fields(settings)
        if (value := getattr(settings, f.name)) is not None or f.default is not None
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    return list(value) if isinstance(value, tuple) else value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of ``above`` over those of ``below``."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = merge(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def explain(kind: type, prefix: str = "") -> list[tuple[str, str, str]]:
    """Every setting of a dataclass as (dotted name, default, explanation), nested ones too."""
    rows = []
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[f.name]):
            rows += explain(typing.cast(type, hints[f.name]), f"{prefix}{f.name}.")
        elif "help" in f.metadata:
            default = f.default if f.default is not dataclasses.MISSING else {}
            inner = _without_none(hints[f.name])
            choices = get_args(inner) if get_origin(inner) is Literal else ()
            help_text = f.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
            shown = "null" if default is None and "none" in choices else _shown(default)
            rows.append((f"{prefix}{f.name}", shown, help_text))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None or value == {} else str(value).lower() if isinstance(value, bool) else str(value)
