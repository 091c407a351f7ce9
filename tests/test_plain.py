"""The bounded reader of YAML and JSON, and text that is only text."""

import json
import time
from pathlib import Path

import pytest
import yaml

from torchdefine.config import Config, convert, setting
from torchdefine.errors import MachineError, UserError, printable
from torchdefine.files import read_json as read_json_file
from torchdefine.files import read_text
from torchdefine.plain import DEEPEST, escaped, read_json, read_yaml, write_yaml
from torchdefine.recipe import load_recipe

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(7)
)


def dates_and_the_like() -> dict[str, str]:
    return {
        "a tag": "a: !!python/name:os.system\n",
        "binary": "a: !!binary aGVsbG8=\n",
        "a set": "a: !!set {b, c}\n",
        "a date by its tag": "a: !!timestamp 2024-01-01\n",
        "no number": "a: !!float abc\n",
        "no whole number": "a: !!int ''\n",
        "no truth value": "a: !!bool perhaps\n",
        "a list as a mapping": "a: !!map [1]\n",
        "many digits": f"a: {'9' * 5000}\n",
        "a large number": f"a: {2**63}\n",
        "deep in brackets": f"a: {'[' * 5000}\n",
        "deep in lines": "".join(f"{' ' * i}a:\n" for i in range(200)),
        "an alias bomb": BOMB,
        "an alias": "a: &a {b: *a}\n",
        "a merged mapping": "a: &a {b: 1}\nc: {<<: *a}\n",
        "half a character": 'a: "\\ud800"\n',
        "line separators": "a: [\u2028\u2028\u2028 b\n\u2028 c: {",
        "a tab after one": "\u2028\u2028a: 1\n\tb: 2\n",
        "a list as a name": "[1, 2]: 3\n",
        "a mapping as a name": "{a: 1}: 3\n",
        "one name in two ways": "1: a\n0x1: b\n",
        "two documents": "a: 1\n---\nb: 2\n",
        "a control character": "a: \x1b[31m\n",
        "too long": "a: " + "x" * (1 << 18),
    }


@pytest.mark.parametrize("what", dates_and_the_like())
def test_odd_yaml_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    text = dates_and_the_like()[what]
    with pytest.raises(UserError, match=r"^It (is not valid YAML|has)") as caught:
        read_yaml(text, "It")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    (path := tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(UserError):
        load_recipe(path)


def test_dates_are_text_and_names_of_any_plain_kind_stay() -> None:
    assert read_yaml("name: 2024-01-01\nat: 2001-12-14t21:59:43.10-05:00\n", "It") == {
        "name": "2024-01-01",
        "at": "2001-12-14t21:59:43.10-05:00",
    }
    names = {"2": "a", "true": "b", "null": "c", "0x1F": "d", "<<": "e"}
    assert read_yaml("2: a\ntrue: b\nnull: c\n0x1F: d\n<<: e\n", "It") == names


def test_a_mapping_of_many_names_takes_a_moment() -> None:
    text = "".join(f"k{i}: 1\n" for i in range(14_000))
    began = time.perf_counter()
    assert len(read_yaml(text, "It")) == 14_000
    assert time.perf_counter() - began < 15


def test_what_is_written_is_read_back() -> None:
    same = [1, 2]
    values = {"a": same, "b": same, "line": "x\u2028y\u0085z\x1b", "0": "2024-01-01", "s": "\U0001f600", "t": "null"}
    text = write_yaml(values)
    assert read_yaml(text, "It") == values == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1),
        '{"a": ' * 40 + "1" + "}" * 40,
        f'{{"a": {"9" * 5000}}}',
        f'{{"a": {2**63}}}',
        '{"a": "\\ud800"}',
        '{"a": ',
        "",
        "\x00",
        " " * (17 << 20),
    ],
    ids=lambda text: f"{text[:6]!r}…{len(text)}",
)
def test_odd_json_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^It (is not valid JSON|has)") as caught:
        read_json(text, "It")
    assert "\n" not in str(caught.value)
    (path := tmp_path / "odd.json").write_text(text)
    with pytest.raises(UserError):
        read_json_file(path)


def test_json_keeps_what_it_had() -> None:
    values = {"a": [1, -(2**62), 1.5, "\u2028", {"b": None}], "é": "\U0001f600"}
    assert read_json(json.dumps(values), "It") == values
    assert read_json(json.dumps(values, ensure_ascii=False), "It") == values


def test_only_files_are_read(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match="is a folder, a pipe or a device, but a file is needed"):
            read_text(odd)
    (tmp_path / "long").write_bytes(b"x" * 2000)
    with pytest.raises(UserError, match="is larger than 0 MiB"):
        read_text(tmp_path / "long", most=1000)
    with pytest.raises(UserError):
        read_text(Path("a\0b"))


def of_whole_numbers(**bounds: float) -> type[Config]:
    from dataclasses import make_dataclass

    return make_dataclass("Some", [("n", int, setting(1, "A number.", **bounds))], bases=(Config,), frozen=True)


def test_whole_numbers_always_have_a_largest() -> None:
    free, bound = of_whole_numbers(at_least=0), of_whole_numbers(at_most=10)
    for odd in ("9" * 30, 10**30, "9" * 5000, 10**5000, "1e300", 1e300, 2**63, "1e5000", "-" + "9" * 40):
        for some in (free, bound):
            with pytest.raises(UserError, match=r"^x\.n is .* but must be") as caught:
                some.read({"n": odd}, "x")
            assert len(str(caught.value)) < 200
    with pytest.raises(UserError, match=r"n is 2147483649, but must be at least 0 and at most 2,147,483,648"):
        free.read({"n": 2**31 + 1})
    with pytest.raises(UserError, match=r"n is 11, but must be at most 10"):
        bound(n=11)
    with pytest.raises(UserError):
        bound(n=10**5000)
    assert of_whole_numbers(below=2**62).read({"n": 2**62 - 1}).n == 2**62 - 1


def test_text_has_no_nul_and_no_half_characters() -> None:
    for odd in ("a\0b", "\ud800"):
        with pytest.raises(UserError, match=r"data.corpus .* is not in UTF-8, or has a NUL in it"):
            convert(str, odd, "data.corpus")


def test_sentences_do_not_command_a_terminal() -> None:
    odd = "\x1b[2J\x07\r\x9b1m\u202eevil\u2028\udc80"
    for error in (UserError(f"There is no {odd}."), MachineError(odd)):
        assert not any(sign in str(error) for sign in "\x1b\x07\r\x9b\u202e\u2028\udc80")
    assert printable("a\tb\nc é 😀") == "a\tb\nc é 😀"
    assert printable("\x1b[0m\u202e") == "\\x1b[0m\\u202e"


def test_escaped_text_is_neither_html_nor_markdown() -> None:
    live = escaped("<script>alert('x')</script> [a](javascript:b) `c` \x1b | **d**")
    assert not set("<>[]`|*\x1b'\"") & set(live)
    import html

    assert html.unescape(live) == "<script>alert('x')</script> [a](javascript:b) `c` \\x1b | **d**"
