"""Reports of runs in every state: finished, broken off early, with one data point, without weights."""

import re
import shutil
from pathlib import Path

import pytest

from tests.training.test_loop import StopAt
from torchdefine import load_run, train
from torchdefine.analysis.neighbours import nearest_neighbours
from torchdefine.analysis.plots import draw
from torchdefine.analysis.report import ReportOptions, write_report
from torchdefine.analysis.run_summary import summarise
from torchdefine.errors import UserError
from torchdefine.training import Interrupted


@pytest.fixture(scope="module")
def runs(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reported")
    plain = {"unit": "none", "map": "standard", "row_dropout": 0.0, "dropout": 0.0}
    train(recipe_file, out=folder / "define")
    train(recipe_file, out=folder / "standard", embedding=plain, output={"kind": "full"})
    train(recipe_file, out=folder / "projected", embedding={**plain, "map": "projective"}, output={"kind": "full"})
    with pytest.raises(Interrupted):
        train(recipe_file, out=folder / "one-point", train={"steps": 200}, reporter=StopAt(28, 15))
    with pytest.raises(Interrupted):
        train(recipe_file, out=folder / "early", train={"steps": 200}, reporter=StopAt(7, 15))
    shutil.copytree(folder / "early", folder / "no-weights")
    shutil.rmtree(folder / "no-weights" / "last")
    shutil.copytree(folder / "no-weights", folder / "nothing")
    (folder / "nothing" / "log.jsonl").unlink()
    return {path.name: path for path in folder.iterdir()}


def report(folders: list[Path], tmp_path: Path, **options) -> str:
    path = tmp_path / "report.html"
    write_report(folders, path, ReportOptions(**{"words": ["w1", "w3", "never-seen"], "prompt": "w1", **options}))
    return path.read_text()


def test_a_report_of_finished_runs_has_every_part(runs: dict[str, Path], tmp_path: Path) -> None:
    page = report([runs["standard"], runs["projected"], runs["define"]], tmp_path)
    for title in ("Result", "Parameters", "While they learned", "Correlation maps", "What they write", "Settings"):
        assert f"<h2>{title}</h2>" in page
    result = load_run(runs["define"]).result
    assert f"{result['test_perplexity']:,.2f}" in page
    assert "distance to standard" in page
    assert "embedding.unit" in page  # where the recipes differ
    assert page.count('type="radio"') == 3
    assert "never-seen" not in page
    assert len(page) < 5_000_000


def test_a_report_needs_nothing_from_outside(runs: dict[str, Path], tmp_path: Path) -> None:
    page = report([runs["define"]], tmp_path)
    assert "<script" not in page
    for link in re.findall(r'(?:href|src|url)\s*[=(]\s*["\']?([^"\')\s>]+)', page):
        assert link.startswith(("#", "data:")), link
    assert "@import" not in page
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert all('aria-label="' in svg for svg in re.findall(r"<svg[^>]*>", page))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one-point", "A single validation so far"),
        ("one-point", "is not finished: its log ends at step 28"),
        ("early", "is not finished: its log ends at step 7"),
        ("no-weights", "No run has written weights that can be read"),
        ("nothing", "has logged nothing yet"),
    ],
)
def test_unfinished_runs_are_reported_and_called_so(
    runs: dict[str, Path], tmp_path: Path, name: str, words: str
) -> None:
    assert words in report([runs[name]], tmp_path)


def test_finished_and_unfinished_runs_share_a_report(runs: dict[str, Path], tmp_path: Path) -> None:
    page = report([runs["define"], runs["early"], runs["nothing"]], tmp_path)
    assert "early is not finished" in page
    assert "nothing has logged nothing yet" in page


def test_summaries_know_parameters_before_the_end(runs: dict[str, Path]) -> None:
    (early,) = summarise([runs["early"]])
    (finished,) = summarise([runs["define"]])
    assert early.parameters == finished.parameters
    assert early.perplexity("test") is None


@pytest.mark.parametrize("kind", ["curves", "parameters", "maps"])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures_of_several_runs(runs: dict[str, Path], tmp_path: Path, kind: str, ending: str) -> None:
    path = tmp_path / f"picture.{ending}"
    draw(kind, [runs["standard"], runs["define"]], path)
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in head


@pytest.mark.parametrize("kind", ["layers", "groups"])
def test_pictures_of_one_run(runs: dict[str, Path], tmp_path: Path, kind: str) -> None:
    draw(kind, [runs["define"]], tmp_path / "picture.png", centred=True)
    assert (tmp_path / "picture.png").stat().st_size > 5_000
    with pytest.raises(UserError, match="is of one run, but 2 were given"):
        draw(kind, [runs["define"], runs["standard"]], tmp_path / "other.png")


def test_pictures_that_cannot_be_drawn(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must end in \.png, \.svg or \.pdf"):
        draw("curves", [runs["define"]], tmp_path / "picture.gif")
    with pytest.raises(UserError, match="No layer has more than one group"):
        draw("groups", [runs["standard"]], tmp_path / "picture.png")
    with pytest.raises(UserError, match="The run standard has no DeFINE unit, so it has no layers to draw"):
        draw("layers", [runs["standard"]], tmp_path / "picture.png")
    with pytest.raises(UserError, match="has written no weights"):
        draw("maps", [runs["nothing"]], tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


def test_neighbours_are_those_of_a_loop(runs: dict[str, Path]) -> None:
    run = load_run(runs["define"])
    table = run.model.embedding.table()
    found = nearest_neighbours(table, run.tokenization, ["w3"], count=3)["w3"]
    index = run.tokenization.id("w3")
    cosines = {}
    for other in range(len(table)):
        if other != index and run.tokenization.counts[other] >= 10:
            a, b = table[index], table[other]
            cosines[run.tokenization.token(other)] = float(a @ b / (a.norm() * b.norm()))
    expected = sorted(cosines, key=cosines.__getitem__, reverse=True)[:3]
    assert [word for word, _ in found] == expected
    assert found[0][1] == pytest.approx(cosines[expected[0]], abs=1e-5)
