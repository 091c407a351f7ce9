"""The harness on a tiny table: rows that go on where they ended, and the method that the page shows."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from leaderboard.__main__ import main
from leaderboard.board import Method, Packed, Table
from leaderboard.measuring import measure, once
from leaderboard.methods import all_methods
from leaderboard.tables import PLACES
from leaderboard.tables.vectors import Vectors

from torchdefine.errors import UserError
from torchdefine.tables.source import Source

ROOT = Path(__file__).parents[2]
ROWS, WIDTH = 300, 32


@pytest.fixture
def table() -> Vectors:
    matrix = torch.randn(ROWS, 8) @ torch.randn(8, WIDTH) + 0.3 * torch.randn(ROWS, WIDTH)
    counts = torch.arange(ROWS, 0, -1).float()
    return Vectors(Source(matrix, counts), {"title": "toy"}, [[1, 2, 3], [4, 5], [6, 7, 8], [9, 10]])


def page_method() -> Method:
    """The method of docs/leaderboard.md."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "leaderboard.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(code.splitlines()) <= 20
    names: dict = {"__name__": "scaled_bytes"}
    exec(compile(code, "leaderboard.md", "exec", dont_inherit=True), names)
    method: Method = names["METHOD"]
    return method


def rows_in(path: Path) -> Iterator[dict]:
    yield from json.loads(path.read_text())["rows"]


def test_a_method_of_ones_own_is_measured_as_the_page_says(table: Vectors, tmp_path: Path) -> None:
    whole = 4 * ROWS * WIDTH
    measure(table, {"scaled_bytes": page_method()}, tmp_path, [whole // 3, whole // 8])
    fits, does_not = rows_in(tmp_path / "scaled_bytes.json")
    assert fits["bytes"] == ROWS * WIDTH + 4 <= fits["budget"]
    assert fits["measures"]["cosine of rows"]["value"] > 0.999
    assert {"commit", "versions", "hardware", "seed", "seconds", "label"} <= set(fits)
    assert does_not["bytes"] is None
    assert "measures" not in does_not


@pytest.mark.parametrize("name", ["full", "torchao_int", "trimmed", "svd", "svd_by_counts", "pca", "slim", "bits"])
def test_methods_keep_to_their_bytes(name: str, table: Vectors) -> None:
    method = all_methods()[name]
    for package in method.packages:
        pytest.importorskip(package)
    budget = max(method.sizes(table)) if method.sizes else 2 * ROWS * WIDTH
    packed = method.pack(table, budget)
    assert packed is not None
    assert packed.bytes <= budget
    measures, _ = table.judge(packed)
    assert set(measures) == {"cosine of rows", "same neighbours", "cosine of sentences", "rank correlation"}
    assert measures["cosine of rows"].value > 0.5


def test_every_method_has_a_title_of_its_own_and_says_what_it_does() -> None:
    methods = all_methods()
    assert len({method.title for method in methods.values()}) == len(methods) >= 12
    for name in methods:
        text = (ROOT / "leaderboard" / "methods" / f"{name}.py").read_text()
        assert text.startswith('"""')


class Counting:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def pack(self, table: Table, budget: int) -> Packed:
        self.calls.append(budget)
        return Packed(table.source.matrix, budget)


def test_rows_are_measured_once_and_again_when_asked(table: Vectors, tmp_path: Path) -> None:
    counting = Counting()
    methods = {"counting": Method("counting", counting.pack)}
    measure(table, methods, tmp_path, [100])
    measure(table, methods, tmp_path, [200, 100])
    assert counting.calls == [100, 200]
    measure(table, methods, tmp_path, [100, 200], again=["counting"])
    assert counting.calls == [100, 200, 100, 200]
    assert [row["budget"] for row in rows_in(tmp_path / "counting.json")] == [200, 100]


def test_rows_of_another_text_do_not_stand_beside(table: Vectors, tmp_path: Path) -> None:
    methods = {"full": all_methods()["full"]}
    measure(table, methods, tmp_path)
    table.facts["title"] = "another"
    with pytest.raises(UserError, match=r"another 'title'.*--again"):
        measure(table, methods, tmp_path)
    assert (tmp_path / "full.json").exists()
    measure(table, methods, tmp_path, again=["full"])


def test_a_method_must_keep_to_its_budget(table: Vectors, tmp_path: Path) -> None:
    fat = Method("fat", lambda table, budget: Packed(table.source.matrix, budget + 1))
    with pytest.raises(UserError, match="must keep to them"):
        measure(table, {"fat": fat}, tmp_path)


def test_a_method_whose_package_is_missing_is_said_not_to_be_run(table: Vectors, tmp_path: Path) -> None:
    said: list[str] = []
    measure(table, {"no": Method("no", Counting().pack, packages=("no-such-package",))}, tmp_path, say=said.append)
    assert said == ["no is not measured: it needs no-such-package."]


def test_what_is_prepared_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDEFINE_CACHE", str(tmp_path))
    first = once({"a": 1}, lambda: {"x": torch.ones(2)})
    assert torch.equal(once({"a": 1}, lambda: {"x": torch.zeros(2)})["x"], first["x"])
    assert not torch.equal(once({"a": 2}, lambda: {"x": torch.zeros(2)})["x"], first["x"])


def test_the_command_says_which_inputs_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["leaderboard", "--inputs", str(tmp_path), "--out", str(tmp_path)])
    main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" is not measured")[0] for line in said] == [*PLACES]
    assert "pip download --no-deps ja_ginza" in said[1]


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["leaderboard", "minilmm", "--inputs", "."])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "did you mean 'minilm'" in capsys.readouterr().err
