"""Settings of a part: one frozen dataclass beside the module that it configures.

It is the constructor's argument and the recipe's section. Its fields explain themselves, carry their bounds, and are
read strictly from YAML or a command line. ``Kinds`` are the alternatives that ``kind:`` picks from.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin

from torchdefine.errors import UserError
from torchdefine.plain import LARGEST, is_text, read_yaml
from torchdefine.plugins import Plugged
from torchdefine.spelling import did_you_mean

C = TypeVar("C", bound="Config")

_types: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""What the fields of a dataclass declare."""
_RULES: dict[str, Callable[[Any, Any], bool]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}
MOST = 1 << 31
"""Of any number that counts something, unless its setting says otherwise."""
MOST_WIDE = 1 << 20
"""Of a vector."""
MOST_DEEP = 1000
"""Of layers upon each other, and of parts of a layer beside each other."""
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class SettingError(UserError):
    """A refused value; the sentence begins with the setting's name, so that its section can stand before it."""


def setting(
    default: Any,
    explanation: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    path: bool = False,
) -> Any:
    """A field with the sentence that ``--help`` prints for it, and its bounds; ``path`` marks a file or folder."""
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
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
        for f in dataclasses.fields(self):
            value, declared = getattr(self, f.name), _without_none(_types(type(self))[f.name])
            if value is None:
                continue
            if declared is int and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{f.name} must be a whole number, not {value!r}.")
            words, choices = _words(declared), ", ".join(map(str, _words(declared)))
            if get_origin(declared) is Literal and value not in words:
                raise SettingError(f"{f.name} is {shorter(value)}, but must be one of {choices}.")
            if words and not isinstance(value, int | float) and value not in words:
                raise SettingError(f"{f.name} is {shorter(value)}, but must be {choices}, or a number.")
            bounds = {} if isinstance(value, str) else _bounds(f, declared)
            for one in value if isinstance(value, tuple) else (value,):
                if not all(_RULES[rule](one, bound) for rule, bound in bounds.items()):
                    rules = " and ".join(f"{rule} {shown_bound(bound)}" for rule, bound in bounds.items())
                    raise SettingError(f"{f.name} is {shorter(value)}, but must be {rules}.")

    def require(self, holds: bool, sentence: str) -> None:
        """Refuse settings that do not go together; the sentence begins with the name of one of them."""
        if not holds:
            raise SettingError(sentence)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in dataclasses.fields(cls)]

    @classmethod
    def read(cls, values: Mapping[str, Any] | str, where: str = "", **defaults: Any) -> Self:
        """Build it from plain values; unknown names and wrong types are refused with their place."""
        arguments, known = dict(defaults), cls.names()
        for name, value in _mapping(values, where).items():
            place = f"{where}.{name}" if where else str(name)
            if name not in known:
                raise UserError(f"The setting {place!r} is unknown{did_you_mean(str(name), known)}")
            arguments[name] = convert(_types(cls)[name], value, place)
        try:
            return cls(**arguments)
        except SettingError as error:
            raise UserError(f"{where}.{error}" if where else str(error)) from None

    @classmethod
    def merged(cls, below: Any, above: Any, where: str) -> dict[str, Any]:
        """``above`` over ``below``."""
        return {**_mapping(below, where), **_mapping(above, where)}


class Kinds:
    """The kinds of one part by name, such as all context models; each is a ``Config`` that builds it."""

    def __init__(self, part: str, *configs: type[Config]) -> None:
        """The first one is the default."""
        self.part = part
        self._kinds: Plugged[tuple[type[Config], dict[str, Any]]] = Plugged(part, {}, lambda config: (config, {}))
        for config in configs:
            self.register(config)
        self.default = next(iter(self._kinds))

    def register(self, config: type[C], name: str | None = None, **defaults: Any) -> type[C]:
        """Add a kind, by the default of its field ``kind`` or under another name with other defaults."""
        self._kinds.register(name or str(config.kind), (config, defaults))  # type: ignore[attr-defined]
        return config

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds.names())

    def config(self, kind: str) -> type[Config]:
        """The settings of a kind."""
        if kind not in self._kinds:
            raise UserError(f"The {self.part} {kind!r} is unknown{did_you_mean(kind, self)}")
        return self._kinds[kind][0]

    def names(self) -> list[str]:
        """The names of the settings of all kinds."""
        return list(dict.fromkeys(name for config, _ in self._kinds.values() for name in config.names()))

    def defaults(self, kind: str) -> dict[str, Any]:
        """The default of every setting of a kind, and of the kind itself, as plain values."""
        own = {name: plain_value(value) for name, value in self._kinds[kind][1].items()}
        return {**defaults(self.config(kind)), **own, "kind": self.default}

    def read(self, values: Mapping[str, Any] | str, where: str = "") -> Any:
        """The settings of the kind that ``values`` name; a plain text is the kind alone."""
        values = _kind_and_settings(values, where)
        kind = str(values.get("kind", self.default))
        config = self.config(kind)
        for foreign in (name for name in values if name not in config.names()):
            # A variant has the settings of the kind that it varies, which stands before it.
            of = {other: name for name, (other, _) in reversed(self._kinds.items()) if foreign in other.names()}
            if of:
                raise UserError(
                    f"{where}.{foreign} belongs to the kind {' and '.join(sorted(of.values()))}, but {where}.kind is "
                    f"{kind}: leave it out, or set another kind."
                )
        return config.read(values, where, **{"kind": kind, **self._kinds[kind][1]})

    def merged(self, below: Any, above: Any, where: str) -> dict[str, Any]:
        """``above`` over ``below``; a kind with other settings starts anew."""
        below, above = _kind_and_settings(below, where), _kind_and_settings(above, where)
        before, after = (self.config(str(one.get("kind", self.default))) for one in (below, above))
        return dict(above) if "kind" in above and before is not after else {**below, **above}

    def changed(self, config: Any, changes: Mapping[str, Any], where: str) -> Any:
        """The same settings with changes; a kind with other settings starts anew."""
        usual = self.defaults(config.kind)
        own = {name: value for name, value in to_plain(config).items() if value != usual[name]}
        return self.read(self.merged({**own, "kind": config.kind}, changes, where), where)


def _mapping(values: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise UserError(f"{place} holds several settings, so it cannot be {values!r}: use {place}.NAME.")
    return values


def _kind_and_settings(values: Any, place: str) -> Mapping[str, Any]:
    return {"kind": values} if isinstance(values, str) else _mapping(values, place)


def _without_none(declared: Any) -> Any:
    """The type of a setting that may also be None, and any other type as it is."""
    if get_origin(declared) not in (Union, types.UnionType):
        return declared
    inner = [one for one in get_args(declared) if one is not type(None)]
    return inner[0] if len(inner) == 1 else declared


def _words(declared: Any) -> tuple[Any, ...]:
    """The choices of a setting that has some; ``Literal[…] | float`` also takes a number."""
    kinds = [declared] if get_origin(declared) is Literal else get_args(declared)
    return tuple(word for one in kinds if get_origin(one) is Literal for word in get_args(one))


def _bounds(f: dataclasses.Field[Any], declared: Any) -> dict[str, float]:
    """The bounds that a setting declares; whole numbers always have a largest one."""
    bounds: dict[str, float] = f.metadata.get("bounds", {})
    counts = declared is int or get_args(declared)[:1] == (int,)
    return bounds if not counts or {"at most", "below"} & bounds.keys() else {**bounds, "at most": MOST}


def shown_bound(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def shorter(value: Any) -> str:
    """A value in a sentence, however long it is."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a number of more than 18 digits"
    return _short.repr(value)


def convert(declared: Any, value: Any, place: str) -> Any:
    """Turn a value into what a field declares; it may be text, as on a command line or as YAML reads 3e-4."""
    inner = _without_none(declared)
    if inner is not declared:
        # "none" is an ordinary choice where a setting has one of that name; null always means None.
        nothing = ("null",) if "none" in _words(inner) else ("none", "null")
        if value is None or (isinstance(value, str) and value.lower() in nothing):
            return None
    origin = get_origin(inner)
    if origin is Literal:
        return value  # one of the choices, or refused by the config
    if words := _words(inner):
        number = isinstance(value, int | float) or _NUMBER.fullmatch(str(value))
        return _convert_plain(float, value, place) if value not in words and number else value
    if origin is tuple:
        if isinstance(value, str):
            value = [item.strip() for item in value.strip("[]() ").split(",") if item.strip()]
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(convert(get_args(inner)[0], item, place) for item in items)
    if origin is dict:
        return _convert_mapping(get_args(inner)[1], value, place)
    return _convert_plain(inner, value, place)


def _convert_mapping(declared: Any, value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = read_yaml(value, place)
    if not isinstance(value, Mapping):
        raise UserError(f"{place} must be a mapping of names to values, such as {{width: 12}}.")
    if declared is Any:
        return {str(name): item for name, item in value.items()}
    return {str(name): convert(declared, item, f"{place}.{name}") for name, item in value.items()}


_WANTED = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
_DIGITS = re.compile(r"\s*-?\d{1,40}\s*")
_NUMBER = re.compile(r"\s*[-+]?[\d.].*", re.DOTALL)
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _convert_plain(declared: type, value: Any, place: str) -> Any:
    if declared is str and isinstance(value, str) and ("\0" in value or not is_text(value)):
        raise UserError(f"{place} {shorter(value)} is not in UTF-8, or has a NUL in it: choose another.")
    with suppress(ValueError, OverflowError, KeyError):
        if declared is bool:
            return value if isinstance(value, bool) else _TRUTH[str(value).lower()]
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return _READERS[declared](value)
    raise UserError(f"{place} is {shorter(value)}, but must be {_WANTED[declared]}.")


def _whole_number(value: Any) -> int:
    # A float would round the digits of a whole number beyond its sixteenth.
    exact = isinstance(value, int) or _DIGITS.fullmatch(str(value)) is not None
    number = int(value) if exact else int(float(value))
    if abs(number) > LARGEST or (not exact and number != float(value)):
        raise ValueError
    return number


def _finite_number(value: Any) -> float:
    if not math.isfinite(float(value)):
        raise ValueError
    return float(value)


_READERS: dict[type, Callable[[Any], Any]] = {str: str, int: _whole_number, float: _finite_number}


def to_plain(config: Any) -> dict[str, Any]:
    """Settings as plain values for YAML or JSON: tuples become lists, and what is left open is left out."""
    return {
        f.name: plain_value(value)
        for f in dataclasses.fields(config)
        if (value := getattr(config, f.name)) is not None or f.default is not None
    }


def plain_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def defaults(config: type[Config]) -> dict[str, Any]:
    """The default of every setting, as plain values."""
    return {f.name: plain_value(_default(f)) for f in dataclasses.fields(config)}


def _default(f: dataclasses.Field[Any]) -> Any:
    return {} if f.default is dataclasses.MISSING else f.default


def explain(config: type[Config]) -> list[tuple[str, str, str]]:
    """Every setting of a part but its kind, for ``--help``: name, explanation and default."""
    rows = []
    for f in dataclasses.fields(config):
        if f.name != "kind":
            inner = _without_none(_types(config)[f.name])
            words = ", ".join(_words(inner))
            choices = (
                f" One of {words}."
                if get_origin(inner) is Literal
                else f" One of {words}, or a number."
                if words
                else ""
            )
            rows.append((f.name, f.metadata["help"] + choices, shown(_default(f))))
    return rows


def shown(value: Any) -> str:
    """A value as a command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value in (None, {}) else str(value).lower() if isinstance(value, bool) else str(value)
