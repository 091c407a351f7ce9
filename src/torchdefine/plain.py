"""Plain values and plain text, whoever wrote them: YAML and JSON read within bounds, and text that is only text."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import yaml

from torchdefine.errors import UserError, printable

YAML_CHARACTERS = 128 << 10
"""Far more than settings need, and read in seconds."""
JSON_CHARACTERS = 16 << 20
DEEPEST = 32
LARGEST = 2**63 - 1
"""The largest whole number that a file or a command line may have; torch counts no further."""
_LONGEST_NUMBER = 40  # characters

_SCALARS = ("null", "bool", "int", "float", "str", "seq", "map")


def is_text(value: str) -> bool:
    """Whether a file may hold it: not where it has half a character, as names of files in other encodings have."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_yaml(text: str, name: str) -> Any:
    """The plain values of a YAML text; ``name`` begins the sentence that refuses one."""
    if len(text) > YAML_CHARACTERS:
        raise UserError(f"{name} has {len(text):,} characters, but settings have at most {YAML_CHARACTERS:,}.")
    try:
        return _Bounded(text).get_single_data()
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not valid YAML{_yaml_problem(text, error)}.") from None


def write_yaml(values: Mapping[str, Any]) -> str:
    """What ``read_yaml`` reads back."""
    return yaml.dump(values, Dumper=_Plain, sort_keys=False, allow_unicode=True)


def read_json(text: str, name: str) -> Any:
    """The plain values of a JSON text; ``name`` begins the sentence that refuses one."""
    if len(text) > JSON_CHARACTERS:
        raise UserError(f"{name} has {len(text):,} characters, but at most {JSON_CHARACTERS:,} are read.")
    try:
        value = json.loads(text, parse_int=_whole_number)
        _check_depth(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character could not be written again
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else printable(error)
        raise UserError(f"{name} is not valid JSON ({reason}): it may have been cut short.") from None
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER or not -LARGEST <= int(digits) <= LARGEST:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [part for one in level if isinstance(one, dict | list) for part in _parts(one)]
        if not level:
            return
    raise RecursionError


def _parts(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return (part for part in (value.values() if isinstance(value, dict) else value) if isinstance(part, dict | list))


class _Bounded(yaml.SafeLoader):
    """Text, numbers, truth values, lists and mappings: no dates, tags or aliases, no name twice, nothing very deep."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refused(f"the alias *{event.anchor} is not read: write its values out", event)
        if self.depth >= DEEPEST:
            raise _refused(f"it is nested more than {DEEPEST} deep", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value; whatever is not one of the plain kinds is refused where it stands."""
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in _SCALARS:
            raise _refused(f"{printable(node.tag)} is not read: settings are text, numbers, lists and mappings", node)
        if kind in ("int", "float") and len(node.value) > _LONGEST_NUMBER:
            raise _refused(f"the number {_start_of(node)} has too many digits", node)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, OverflowError):
            raise _refused(f"{_start_of(node)} cannot be read as {kind}", node) from None
        if kind == "int" and abs(value) > LARGEST:
            raise _refused(f"the number {_start_of(node)} is too large", node)
        if kind == "str" and not is_text(value):
            raise _refused("half a character (a lone surrogate) is not text", node)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Names are text, as written; one that stands in a mapping twice is refused, since only one would count."""
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise _refused("a list or a mapping cannot be the name of a setting", key)
            if first.setdefault(key.value, key) is not key:
                raise _refused(f"{_start_of(key)!r} is set twice", first[key.value])
        values = super().construct_mapping(node, deep)
        if len(values) < len(first):
            raise _refused("two of its names are the same value", node)
        return dict(zip(first, values.values(), strict=True))


_Bounded.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":merge", ":value"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Plain(yaml.SafeDumper):
    """Writes out every value where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _start_of(node: yaml.Node) -> str:
    return printable(str(node.value)[:_LONGEST_NUMBER])


def _refused(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, at.start_mark)


def _yaml_problem(text: str, error: yaml.YAMLError) -> str:
    """The end of a sentence on where and why a text is not YAML."""
    if isinstance(error, yaml.reader.ReaderError):
        return f" in line {text.count(chr(10), 0, error.position) + 1}: {error.reason}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f": {' '.join(str(error).split())}"
    mark = error.problem_mark
    if mark.buffer is not None and mark.buffer[mark.pointer : mark.pointer + 1] == "\t":
        return f" in line {mark.line + 1}, which has a tab: indent by spaces"
    return f" in line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


class PrintedStream:
    """A stream that a person reads: whatever is written to it is printable."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        return self.raw.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_stream(stream: Any) -> Any:
    """The stream below, for a library that draws with control characters of its own."""
    return stream.raw if isinstance(stream, PrintedStream) else stream


_MARKUP = re.compile(r"[\[\]`*|\\~]")


def escaped(text: object) -> str:
    """Text as it stands, for HTML and for Markdown."""
    return _MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", html.escape(printable(text)))
