"""Settings of a part: one frozen dataclass beside the module that it configures.

It is the constructor's argument and the recipe's section. Its fields explain themselves, carry their bounds, and are
read strictly from YAML or a command line. ``Kinds`` are the alternatives that ``kind:`` picks from.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin

import yaml

from torchdefine.errors import UserError
from torchdefine.spelling import did_you_mean

C = TypeVar("C", bound="Config")


class SettingError(UserError):
    """A refused value; the sentence begins with the setting's name, so that its section can stand before it."""


def setting(
    default: Any,
    explanation: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    path: bool = False,
) -> Any:
    """A field with the sentence that ``--help`` prints for it, and its bounds; ``path`` marks a file or folder."""
    bounds = {"at least": at_least, "above": above, "below": below}
    metadata = {"help": explanation, "bounds": {k: v for k, v in bounds.items() if v is not None}, "path": path}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def rate(explanation: str, default: float = 0.0) -> Any:
    """A field for a probability below 1, such as a dropout rate."""
    return setting(default, explanation, at_least=0, below=1)


@dataclass(frozen=True)
class Config:
    """The settings of a part. Values out of bounds and unknown choices are refused when it is made."""

    def __post_init__(self) -> None:
        kinds = _kinds_of_fields(type(self))
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), _without_none(kinds[f.name])
            if value is None:
                continue
            if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{f.name} must be a whole number, not {value!r}.")
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise SettingError(f"{f.name} is {value!r}, but must be one of {', '.join(map(str, get_args(kind)))}.")
            bounds = f.metadata.get("bounds", {})
            if not all(_within(value, name, bound) for name, bound in bounds.items()):
                rule = " and ".join(f"{name} {bound:g}" for name, bound in bounds.items())
                raise SettingError(f"{f.name} is {value}, but must be {rule}.")

    def require(self, holds: bool, sentence: str) -> None:
        """Refuse settings that do not go together; the sentence begins with the name of one of them."""
        if not holds:
            raise SettingError(sentence)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str = "", **defaults: Any) -> Self:
        """Build it from plain values; unknown names and wrong types are refused with their place."""
        known = {f.name for f in dataclasses.fields(cls)}
        kinds = _kinds_of_fields(cls)
        arguments = dict(defaults)
        for name, value in values.items():
            place = f"{where}.{name}" if where else str(name)
            if name not in known:
                raise UserError(f"The setting {place!r} is unknown{did_you_mean(str(name), known)}")
            arguments[name] = convert(kinds[name], value, place)
        try:
            return cls(**arguments)
        except SettingError as error:
            raise UserError(f"{where}.{error}" if where else str(error)) from None


class Kinds:
    """The kinds of one part by name, such as all context models; each is a ``Config`` that builds it."""

    def __init__(self, part: str, *configs: type[Config]) -> None:
        """The first one is the default."""
        self.part = part
        self._configs: dict[str, tuple[type[Config], dict[str, Any]]] = {}
        for config in configs:
            self.register(config)
        self.default = next(iter(self._configs))

    def register(self, config: type[C], name: str | None = None, **defaults: Any) -> type[C]:
        """Add a kind, by the default of its field ``kind`` or under another name with other defaults."""
        name = name or str(config.kind)  # type: ignore[attr-defined]
        if name in self._configs:
            raise UserError(f"The {self.part} {name!r} is registered already: use another name.")
        self._configs[name] = (config, defaults)
        return config

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def config(self, name: str) -> type[Config]:
        """The settings of a kind."""
        if name not in self._configs:
            raise UserError(f"The {self.part} {name!r} is unknown{did_you_mean(name, self)}")
        return self._configs[name][0]

    def settings(self) -> list[str]:
        """The names of the settings of all kinds."""
        return list(dict.fromkeys(f.name for config, _ in self._configs.values() for f in dataclasses.fields(config)))

    def defaults(self, name: str) -> dict[str, Any]:
        """The default of every setting of a kind, and of the kind itself, as plain values."""
        own = {key: plain_value(value) for key, value in self._configs[name][1].items()}
        return {**defaults(self.config(name)), **own, "kind": self.default}

    def read(self, values: Mapping[str, Any] | str, where: str = "") -> Any:
        """The settings of the kind that ``values`` name; a plain text is the kind alone."""
        values = self.normalised(values, where)
        name = str(values.get("kind", self.default))
        config = self.config(name)
        own = {f.name for f in dataclasses.fields(config)}
        for foreign in (key for key in values if key not in own):
            others = {kind: other for other, (kind, _) in reversed(self._configs.items()) if foreign in _names(kind)}
            if others:
                shown = " and ".join(sorted(others.values()))
                raise UserError(
                    f"{where}.{foreign} belongs to the kind {shown}, but {where}.kind is {name}: leave it out, or set "
                    f"another kind."
                )
        return config.read(values, where, **{"kind": name, **self._configs[name][1]})

    def changed(self, config: Any, changes: Mapping[str, Any], where: str) -> Any:
        """The same settings with changes; a kind with other settings starts anew."""
        return (
            self.read(self.merged({**changed(config), "kind": config.kind}, changes, where), where)
            if changes
            else config
        )

    def normalised(self, values: Mapping[str, Any] | str, where: str) -> Mapping[str, Any]:
        """Values as a mapping; a plain text is the name of a kind."""
        if isinstance(values, str):
            return {"kind": values}
        require_settings(values, where)
        return values

    def merged(self, below: Any, above: Any, where: str) -> dict[str, Any]:
        """``above`` over ``below``; a kind with other settings starts anew."""
        below, above = self.normalised(below, where), self.normalised(above, where)
        before, after = (str(one.get("kind", self.default)) for one in (below, above))
        if "kind" in above and self.config(before) is not self.config(after):
            return dict(above)
        return {**below, **above}


def _within(value: Any, name: str, bound: float) -> bool:
    return bool({"at least": value >= bound, "above": value > bound, "below": value < bound}[name])


@cache
def _kinds_of_fields(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config)


def _names(config: type[Config]) -> set[str]:
    return {f.name for f in dataclasses.fields(config)}


def require_settings(value: Any, place: str) -> None:
    """Refuse a value in the place of several settings."""
    if not isinstance(value, Mapping):
        raise UserError(f"{place} holds several settings, so it cannot be {value!r}: use {place}.NAME.")


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
    try:
        json.dumps(value, default=str, skipkeys=True)
    except ValueError:
        raise UserError(f"{place} holds itself by an alias: write its values out.") from None
    inner = get_args(kind)[1]
    plain = inner in (int, float, str, bool)
    return {str(name): convert(inner, item, f"{place}.{name}") if plain else item for name, item in value.items()}


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
            if kind is int and (isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal())):
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


def to_plain(config: Any) -> dict[str, Any]:
    """Settings as plain values for YAML or JSON: tuples become lists, and what is left open is left out."""
    return {
        f.name: plain_value(value)
        for f in dataclasses.fields(config)
        if (value := getattr(config, f.name)) is not None or f.default is not None
    }


def plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    return list(value) if isinstance(value, tuple) else value


def changed(config: Any) -> dict[str, Any]:
    """The settings that have another value than their default, as plain values."""
    return {f.name: plain_value(getattr(config, f.name)) for f in dataclasses.fields(config) if differs(config, f)}


def defaults(config: type[Config]) -> dict[str, Any]:
    """The default of every setting, as plain values."""
    return {f.name: default_of(f) for f in dataclasses.fields(config)}


def differs(config: Any, f: dataclasses.Field[Any]) -> bool:
    return bool(plain_value(getattr(config, f.name)) != default_of(f))


def default_of(f: dataclasses.Field[Any]) -> Any:
    return plain_value(f.default if f.default is not dataclasses.MISSING else {})


@dataclass(frozen=True)
class Explained:
    """A setting for ``--help``."""

    name: str
    default: str
    explanation: str


def explain(config: type[Config]) -> list[Explained]:
    """Every setting of a part but its kind."""
    rows = []
    kinds = _kinds_of_fields(config)
    for f in dataclasses.fields(config):
        if f.name == "kind":
            continue
        inner = _without_none(kinds[f.name])
        choices = get_args(inner) if get_origin(inner) is Literal else ()
        text = f.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
        default = f.default if f.default is not dataclasses.MISSING else {}
        rows.append(Explained(f.name, "null" if default is None and "none" in choices else _shown(default), text))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None or value == {} else str(value).lower() if isinstance(value, bool) else str(value)
