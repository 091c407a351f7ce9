"""Reports of runs in every state: finished, broken off early, with one data point, without weights."""

import dataclasses
import logging
import math
import re
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.test_loop import StopAt
from torchdefine import load_run, train
from torchdefine.analysis.correlation import CorrelationMap, layout_rows, standard_table
from torchdefine.analysis.neighbours import frequent_words, nearest_neighbours, readable_token
from torchdefine.analysis.pictures import curve_figure, parameter_figure, readable_ticks, save_figure, undrawn_curves
from torchdefine.analysis.report import draw, write_report
from torchdefine.analysis.run_summary import RunSummary, summarise
from torchdefine.data import Vocabulary
from torchdefine.data.tokenizer import train_subwords_on
from torchdefine.embedding import EMBEDDINGS, UNITS
from torchdefine.errors import UserError
from torchdefine.training import Interrupted


@pytest.fixture(scope="module")
def runs(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reported")
    plain: dict[str, Any] = {"unit": "none", "output": "full"}
    train(recipe_file, out=folder / "define")
    train(recipe_file, out=folder / "standard", embedding={"kind": "standard", "map_dim": 16}, **plain)
    train(recipe_file, out=folder / "projected", embedding={"kind": "projective", "map_dim": 16}, **plain)
    with pytest.raises(Interrupted):
        train(recipe_file, out=folder / "one-point", train={"steps": 200}, reporter=StopAt(28, signal.SIGTERM))
    with pytest.raises(Interrupted):
        train(recipe_file, out=folder / "early", train={"steps": 200}, reporter=StopAt(7, signal.SIGTERM))
    shutil.copytree(folder / "early", folder / "no-weights")
    shutil.rmtree(folder / "no-weights" / "last")
    shutil.copytree(folder / "no-weights", folder / "nothing")
    (folder / "nothing" / "log.jsonl").unlink()
    return {path.name: path for path in folder.iterdir()}


def report(folders: list[Path], tmp_path: Path, **options) -> str:
    path = tmp_path / "report.html"
    write_report(folders, path, **{"words": ["w1", "w3", "never-seen"], "prompt": "w1", **options})
    return path.read_text()


def test_a_report_of_finished_runs_has_every_part(runs: dict[str, Path], tmp_path: Path) -> None:
    page = report([runs["standard"], runs["projected"], runs["define"]], tmp_path)
    for title in ("Result", "Parameters", "Training curves", "Correlation maps", "Samples", "Settings"):
        assert f"<h2>{title}</h2>" in page
    result = load_run(runs["define"]).result
    assert f"{result['test_perplexity']:,.2f}" in page
    assert "distance to standard" in page
    assert "unit.kind" in page  # where the recipes differ
    assert page.count('type="radio"') == 3
    assert page.count("<p>Not in the vocabulary: never-seen.</p>") == 3
    assert "Not in the vocabulary" not in report([runs["define"]], tmp_path, words=["w1"])
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


def test_every_map_is_a_picture_of_its_own_with_its_numbers(runs: dict[str, Path], tmp_path: Path) -> None:
    """So that as many stand side by side as a screen has room for."""
    page = report([runs["standard"], runs["define"]], tmp_path)
    maps = re.findall(r'<img src="data:image/png;base64,[^"]+" alt="Correlation map of ([^"]+)">', page)
    assert maps[:2] == ["Standard: standard", "DeFINE: define"]
    assert {"map", "layer 1, group 1", "finished"} <= set(maps)
    assert len(re.findall(r"<figcaption>[^<]+<br>mean 0\.\d+, rank \d+ of \d+</figcaption>", page)) == len(maps)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one-point", "There is only one validation so far"),
        ("one-point", "is not finished: its log ends at step 28"),
        ("early", "is not finished: its log ends at step 7"),
        ("no-weights", "No run has readable weights"),
        ("nothing", "has logged nothing yet"),
    ],
)
def test_unfinished_runs_are_reported_and_called_so(
    runs: dict[str, Path], tmp_path: Path, name: str, words: str
) -> None:
    assert words in report([runs[name]], tmp_path)


def test_a_name_of_a_run_is_text_everywhere(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["define"], tmp_path / 'a" onload="x" <b>&')
    found: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found.update((tag, *(name for name, _ in attributes)))

    Reader().feed(report([tmp_path / 'a" onload="x" <b>&'], tmp_path))
    assert {"svg", "aria-label"} <= found
    assert not {"b", "onload"} & found


def test_last_weights_in_the_place_of_damaged_ones_are_called_so(
    runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(runs["define"], damaged := tmp_path / "damaged")
    assert "cannot be read" not in report([damaged], tmp_path)
    best = damaged / "best" / "checkpoint.safetensors"
    best.write_bytes(best.read_bytes()[:100])
    assert f"The best weights of {damaged} cannot be read, so the report shows the last ones" in report(
        [damaged], tmp_path
    )
    draw("maps", [damaged], tmp_path / "maps.svg")
    assert f"The best weights of {damaged} cannot be read" in caplog.text


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


def test_the_recipe_of_every_run_stands_at_the_top(runs: dict[str, Path], tmp_path: Path, recipe_file: Path) -> None:
    page = report([runs["standard"], runs["define"]], tmp_path)
    head = page[page.index("<header>") : page.index("</header>")]
    assert f"<dt>define</dt><dd>{recipe_file}: A tiny model for tests</dd>" in head
    changed = "A tiny model for tests, changed by embedding.kind standard, unit.kind none, output.kind full"
    assert f"<dt>standard</dt><dd>{recipe_file}: {changed}</dd>" in head


def test_a_prompt_of_unknown_words_is_called_so(runs: dict[str, Path], tmp_path: Path) -> None:
    assert "read as &lt;unk&gt;" not in report([runs["define"]], tmp_path, prompt="w1")
    assert "These words are not in the vocabulary and are read as &lt;unk&gt;: zebra, &amp;." in report(
        [runs["define"]], tmp_path, prompt="zebra w1 &"
    )


def test_what_the_numbers_mean_is_said_beside_them(runs: dict[str, Path], tmp_path: Path) -> None:
    page = report([runs["standard"], runs["define"]], tmp_path)
    assert "The effective rank is the number of independent dimensions" in page
    assert "The distance to standard is the mean absolute difference between the entries of the two maps" in page
    assert "The distance to" not in report([runs["define"]], tmp_path)


def test_only_settings_with_an_effect_are_said_to_differ(runs: dict[str, Path], tmp_path: Path) -> None:
    page = report([runs["standard"], runs["define"]], tmp_path)
    table = page[page.index("Settings that differ") : page.index("the whole recipe")]
    rows = dict(re.findall(r"<tr><td>([\w.]+)</td><td>([^<]*)</td>", table))
    assert rows["unit.kind"] == "none"
    assert rows["unit.expand_dim"] == rows["embedding.cutoffs"] == "–"
    assert not rows.keys() & {"unit.depth", "unit.norm", "output.cutoffs"}
    for section in ("source:", "beam:"):
        assert section not in page


def test_curves_begin_where_training_does_and_have_readable_ticks(runs: dict[str, Path]) -> None:
    (summary,) = summarise([runs["define"]])
    (axes,) = curve_figure([summary], "step").axes
    training, validation = (list(line.get_xdata()) for line in axes.lines[:2])
    assert training[0] == 7
    assert validation[0] == 25
    assert axes.lines[0].get_linewidth() < axes.lines[1].get_linewidth()
    low, high = axes.get_ylim()
    shown = [text.get_text() for text in axes.get_yticklabels()]
    assert len([text for text in shown if re.fullmatch(r"[\d,.]+", text)]) >= 3
    assert all(low <= tick <= high for tick in axes.get_yticks())


def test_a_run_that_is_not_drawn_is_named_with_the_reason(runs: dict[str, Path]) -> None:
    define, standard, nothing = summarise([runs["define"], runs["standard"], runs["nothing"]])
    spoilt = [{**record, "perplexity": math.inf} for record in define.valid]
    infinite = dataclasses.replace(define, name="infinite", valid=spoilt, train=[])
    partly = dataclasses.replace(define, name="partly", valid=[spoilt[0], *define.valid[1:]])
    sentences = [
        "nothing is not drawn: it has logged nothing yet.",
        "infinite is not drawn: its perplexity is not finite.",
        "partly is drawn in part: some of its perplexities are not finite.",
    ]
    assert undrawn_curves([standard, nothing, infinite, partly]) == sentences
    (axes,) = curve_figure([standard, nothing, infinite, partly]).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {sentence.rstrip(".") for sentence in sentences} < set(legend)
    assert "standard" in legend
    assert curve_figure([infinite]).axes[0].get_legend() is not None


def test_maps_stand_by_kind_and_width_and_are_compared_with_a_standard_table(runs: dict[str, Path]) -> None:
    (summary,) = summarise([runs["standard"]])

    def run(name: str, unit: str = "none", **embedding: Any) -> RunSummary:
        untied = dataclasses.replace(summary.recipe.output, tied="none")
        settings = {"embedding": EMBEDDINGS.read(embedding), "unit": UNITS.read(unit)}
        recipe = dataclasses.replace(summary.recipe, **settings, output=untied)
        return dataclasses.replace(summary, name=name, recipe=recipe)

    shown = [
        run("projective", kind="projective"),
        run("wide", map_dim=64),
        run("narrow", map_dim=16),
        run("banded", kind="adaptive"),
        run("mlp", "mlp"),
        run("define", "define", kind="adaptive"),
    ]
    maps = {one.name: CorrelationMap(one.name, torch.eye(3)) for one in shown}
    assert [(kind, [one.name for one in row]) for kind, row in layout_rows(shown, maps)] == [
        ("Standard", ["narrow", "wide"]),
        ("Adaptive", ["banded"]),
        ("Projected", ["projective", "mlp"]),
        ("DeFINE", ["define"]),
    ]
    assert standard_table(shown, maps) is maps["wide"]


def test_a_smoothed_training_loss_is_not_drawn_as_a_perplexity(runs: dict[str, Path]) -> None:
    define, standard = summarise([runs["define"], runs["standard"]])
    losses = [{k: v for k, v in record.items() if k != "perplexity"} for record in define.train]
    smoothed = dataclasses.replace(define, train=losses)
    sentence = "The training curve of define is not drawn: a loss with label smoothing gives no perplexity."
    assert undrawn_curves([smoothed]) == [sentence]
    (axes,) = curve_figure([smoothed]).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sentence.rstrip(".") in legend
    assert "training" not in legend
    assert len([line for line in axes.lines if len(line.get_xdata()) == len(define.train)]) == 0
    assert undrawn_curves([smoothed, smoothed, standard])[-1].startswith("The training curve of 2 runs is not drawn")
    assert undrawn_curves([dataclasses.replace(smoothed, valid=[])]) == [sentence]


def test_only_a_bar_that_is_one_for_all_is_drawn(runs: dict[str, Path]) -> None:
    (define,) = summarise([runs["define"]])
    assert define.result is not None
    other = dataclasses.replace(define, result={**define.result, "valid_unigram_perplexity": 3.0})
    for shown, is_drawn in (([define, define], True), ([define, other], False)):
        labels = [text.get_text() for text in curve_figure(shown).axes[0].get_legend().get_texts()]
        assert ("unigram" in labels) == is_drawn


@pytest.mark.parametrize("names", [("1", "3e-3"), ("2024-01-01", "2024-01-02")])
def test_a_name_that_looks_like_a_number_is_a_name(
    runs: dict[str, Path], names: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    (define,) = summarise([runs["define"]])
    with caplog.at_level(logging.INFO):
        (axes,) = parameter_figure([dataclasses.replace(define, name=name) for name in names]).axes
    assert caplog.messages == []
    assert tuple(text.get_text() for text in axes.get_yticklabels()) == names
    assert len({bar.get_y() for bar in axes.patches}) == 2


def test_a_name_with_signs_that_mean_something_to_matplotlib_is_a_name(runs: dict[str, Path], tmp_path: Path) -> None:
    (define,) = summarise([runs["define"]])
    named = [dataclasses.replace(define, name=name) for name in ("x$_$", "_hidden")]
    curves = curve_figure(named)
    labels = [text.get_text().strip() for text in curves.axes[0].get_legend().get_texts()]
    assert labels[:2] == ["x$_$", "_hidden"]
    for figure in (curves, parameter_figure(named)):
        save_figure(figure, tmp_path / "picture.svg")
        assert {"x$_$", "_hidden"} <= set(re.findall(r">\s*([^<>]*?)</text>", (tmp_path / "picture.svg").read_text()))


@given(st.floats(1.0, 1e5), st.floats(1.01, 1e4))
def test_an_axis_has_at_least_three_round_ticks(low: float, ratio: float) -> None:
    ticks = readable_ticks(low, low * ratio)
    assert 3 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))
    assert low <= ticks[0] < ticks[-1] <= low * ratio


def test_words_to_look_at_come_from_the_vocabulary() -> None:
    """Frequent, beyond the most frequent, long enough to mean something, and never a rare one."""
    names = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(600)]
    tokens = ["<unk>", "<eos>", ",", *(f"{name}{'ing' if i % 2 else ''}" for i, name in enumerate(names))]
    counts = [*range(2000, 2000 - 403, -1), *[9] * 200]
    chosen = frequent_words(Vocabulary(tokens, counts))
    assert len(chosen) == len(set(chosen)) == 10
    ranks = [tokens.index(word) for word in chosen]
    assert ranks == sorted(ranks)
    assert all(len(word) >= 4 for word in chosen)
    assert min(ranks) > 60
    assert max(ranks) < 403
    tiny = Vocabulary(["w1", "w2", "<eos>", "<unk>"], [20, 15, 12, 11])
    assert frequent_words(tiny) == ["w1", "w2"]


def test_a_vocabulary_of_rare_words_has_no_neighbours_rather_than_false_ones() -> None:
    words = Vocabulary(["alpha", "beta", "gamma", "<eos>", "<unk>"], [30, 20, 3, 2, 1])
    found = nearest_neighbours(torch.randn(5, 4), words, ["alpha"])
    assert [word for word, _ in found["alpha"]] == ["beta"]


def test_subwords_are_shown_as_text() -> None:
    pytest.importorskip("tokenizers")
    tokens = train_subwords_on([["die Männer am Fluss", "Männer und Flüsse"] * 40], 330, sentences=True)
    assert tokens.id("ĠMÃ¤nner") != tokens.unk_id
    assert readable_token(tokens, tokens.id("ĠMÃ¤nner")) == "Männer"
    assert readable_token(tokens, tokens.id("s")) == "-s"
    assert "Männer" in frequent_words(tokens)
    found = nearest_neighbours(torch.randn(len(tokens), 8), tokens, ["Männer", "unbekannt"], count=200)
    assert list(found) == ["Männer"]
    shown = [word for word, _ in found["Männer"]]
    assert "Fluss" in shown
    assert all(word.isprintable() and not re.search("[Ġ�]", word) for word in shown)
    assert not {"<pad>", "<bos>"} & set(shown)


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
