import copy
import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docs.draw_figures import draw_plan

from tests.training.test_loop import StopAt
from torchdefine import train
from torchdefine.analysis.comparison import Comparison, compare_runs
from torchdefine.analysis.run_summary import RunSummary
from torchdefine.data.tokenizer import train_subwords
from torchdefine.embedding import UnitConfig, make_plan
from torchdefine.files import write_sealed
from torchdefine.recipe import load_recipe
from torchdefine.training import Interrupted

PLAIN: dict[str, Any] = {"embedding": {"kind": "standard", "map_dim": 16}, "unit": "none", "output": "full"}
SHORT = {"steps": 8, "log_every": 4}


@pytest.fixture(scope="module")
def runs(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("compared")
    for seed in (1, 2):
        train(recipe_file, out=folder / f"seed-{seed}", train={"seed": seed, "steps": 20})
    return [folder / "seed-1", folder / "seed-2"]


def of_training(result: dict[str, Any]) -> int:
    return result["data"]["splits"]["train"]["tokens"]


def test_equal_runs_compare_without_warnings_and_the_best_is_marked(runs: list[Path]) -> None:
    comparison = compare_runs(runs)
    assert comparison.warnings == []
    marked = [cell for cell in column(comparison, "test") if cell.endswith("*")]
    best = min(run.result["test_perplexity"] for run in comparison.runs)
    assert [float(cell.rstrip("*")) for cell in marked] == [round(best, 2)]
    assert "* marks the best" in comparison.note
    assert "A model that only counts words has a test perplexity of" in comparison.note
    assert not {"<unk>", "unigram"} & set(comparison.columns)
    json.dumps(comparison.to_dict())


def test_a_run_alone_is_not_the_best_one(runs: list[Path]) -> None:
    comparison = compare_runs(runs[:1])
    assert marks(comparison) == []
    assert "*" not in comparison.note


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(tokens=1), "different numbers of tokens"),
        (lambda r: r["data"]["splits"]["train"].update(text_sha256="x"), "trained on different texts"),
        (
            lambda r: r["data"]["splits"]["train"].update(tokens=round(0.98 * of_training(r))),
            "but on different amounts of text",
        ),
    ],
)
def test_unequal_runs_are_called_so(runs: list[Path], change: Callable[[Any], None], words: str) -> None:
    comparison = changed(runs, change)
    (warning,) = comparison.warnings
    assert words in warning
    assert marks(comparison) == ["valid", "test"]  # what the models reached still compares


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["data"].update(vocabulary_sha256="x"), "different vocabularies: do not compare perplexities"),
        (lambda r: r["data"]["splits"]["test"].update(text_sha256="x"), "evaluated on different texts"),
        (lambda r: r["data"]["splits"]["valid"].update(text_sha256="x"), "evaluated on different texts"),
        (lambda r: r["evaluation"]["test"].update(protocol="x"), "different protocols"),
        (lambda r: r["evaluation"]["valid"].update(protocol="x"), "different protocols"),
    ],
)
def test_among_numbers_that_do_not_compare_none_is_best(
    runs: list[Path], change: Callable[[Any], None], words: str
) -> None:
    comparison = changed(runs, change)
    (warning,) = comparison.warnings
    assert words in warning
    assert marks(comparison) == []
    assert "*" not in comparison.note


def test_of_short_pieces_none_is_best(runs: list[Path]) -> None:
    def short(result: dict[str, Any]) -> None:
        result["evaluation"]["valid"]["tokens"] = 300

    one, other = compare_runs(runs).runs
    streams = one.recipe.eval.batch_size
    assert streams > 1
    short(one.result)
    short(other.result)
    comparison = Comparison([one, other])
    (warning,) = comparison.warnings
    assert f"{streams} streams share only 300 tokens" in warning
    assert "--split valid" in warning
    assert marks(comparison) == []


def test_tokens_of_the_same_text_are_not_called_another_text(runs: list[Path]) -> None:
    """Equal texts in other vocabularies have other tokens."""

    def other_vocabulary(result: dict[str, Any]) -> None:
        result["data"]["vocabulary_sha256"] = "x"
        for split in result["data"]["splits"].values():
            split.update(tokens_sha256="x", tokens=split["tokens"] + 1)

    (warning,) = changed(runs, other_vocabulary).warnings
    assert (
        warning == "The runs have different vocabularies: do not compare perplexities; compare bits per byte instead."
    )


def test_shares_unknown_of_the_validation_text_count_where_there_is_no_other(runs: list[Path]) -> None:
    def valid_alone(result: dict[str, Any]) -> None:
        del result["evaluation"]["test"], result["data"]["splits"]["test"], result["test_perplexity"]

    def cut_vocabulary(result: dict[str, Any]) -> None:
        valid_alone(result)
        result["data"]["vocabulary_sha256"] = "x"
        result["evaluation"]["valid"]["unknown_share"] = 0.2

    one, other = compare_runs(runs).runs
    for run, change in ((one, valid_alone), (other, cut_vocabulary)):
        change(run.result)
    assert Comparison([one, other]).warnings[0] == (
        "The vocabularies differ, so that 20.0% of the valid text is <unk> in seed-2 and 0.0% in seed-1: do "
        "not compare perplexities or bits per byte."
    )


def test_a_run_is_named_by_its_folder_however_that_is_written(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs[0])
    assert [run.name for run in compare_runs([".", "../seed-2"]).runs] == ["seed-1", "seed-2"]
    monkeypatch.chdir(runs[0] / "best")
    assert [run.name for run in compare_runs([".."]).runs] == ["seed-1"]


@pytest.mark.parametrize(
    ("missing", "words"),
    [(["valid", "test"], "no valid or test text"), (["valid"], "no valid text"), (["test"], "no test text")],
)
def test_a_run_without_a_text_to_measure_is_called_not_evaluated(
    runs: list[Path], missing: list[str], words: str
) -> None:
    def unmeasured(result: dict[str, Any]) -> None:
        for split in missing:
            del result["evaluation"][split], result["data"]["splits"][split], result[f"{split}_perplexity"]

    comparison = changed(runs, unmeasured)
    assert comparison.warnings == [f"seed-2 was not evaluated: it has {words}."]
    assert marks(comparison) == [split for split in ("valid", "test") if split not in missing]


def test_what_was_not_evaluated_does_not_keep_others_from_being_the_best(runs: list[Path]) -> None:
    def unmeasured(result: dict[str, Any]) -> None:
        result["data"].update(vocabulary_sha256="x", splits={"train": result["data"]["splits"]["train"]})
        result["evaluation"] = {}
        del result["valid_perplexity"], result["test_perplexity"]

    first, bare = changed(runs, unmeasured).runs
    comparison = Comparison([first, compare_runs(runs).runs[1], dataclasses.replace(bare, name="bare")])
    assert comparison.warnings == ["bare was not evaluated: it has no valid or test text."]
    assert marks(comparison) == ["valid", "test"]


def test_a_small_vocabulary_does_not_win_by_saying_that_it_knows_nothing(
    runs: list[Path], recipe_file: Path, tmp_path: Path
) -> None:
    plain = {**PLAIN, "train": SHORT}
    for name, words in (("small", 8), ("large", None)):
        train(recipe_file, out=tmp_path / name, data={"max_size": words} if words else None, **plain)
    comparison = compare_runs([tmp_path / "large", tmp_path / "small"])
    share = comparison.runs[1].evaluation("test")["unknown_share"]
    assert share > 0.1
    assert comparison.warnings == [
        f"The vocabularies differ, so that {share:.1%} of the test text is <unk> in small and 0.0% in large: do "
        "not compare perplexities or bits per byte."
    ]
    assert marks(comparison) == []
    assert column(comparison, "<unk>") == ["0.00%", f"{share:.2%}"]
    assert [run["test_unknown_share"] for run in comparison.to_dict()["runs"]] == [0.0, share]
    counted = [f"{run.result['test_unigram_perplexity']:,.1f}" for run in comparison.runs]
    assert column(comparison, "unigram") == counted
    assert counted[0] != counted[1]
    assert "only counts words" not in comparison.note


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (0.0008, "; compare bits per byte instead."),
        (0.002, "0.2% of the test text is <unk> in another and 0.0% in seed-1: do not"),
    ],
)
def test_a_few_words_more_that_are_unknown_do_no_harm(runs: list[Path], more: float, words: str) -> None:
    def other_vocabulary(result: dict[str, Any]) -> None:
        result["data"]["vocabulary_sha256"] = "x"
        result["evaluation"]["test"]["unknown_share"] += more

    first, other = changed(runs, other_vocabulary).runs
    for order in (1, -1):
        (warning,) = Comparison([first, dataclasses.replace(other, name="another")][::order]).warnings
        assert words in warning


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (None, "; compare bits per byte instead."),
        (0.0008, "; compare bits per byte instead."),
        (0.04, "loses 4.0% of the characters of the test text: do not compare perplexities or bits per byte."),
    ],
)
def test_bytes_that_a_tokenizer_loses_are_no_credit(runs: list[Path], lost: float | None, words: str) -> None:
    def other_vocabulary(result: dict[str, Any]) -> None:
        result["data"]["vocabulary_sha256"] = "x"
        result["data"]["splits"]["test"]["lost_share"] = lost

    (warning,) = changed(runs, other_vocabulary).warnings
    assert warning.endswith(words)


def test_other_words_of_another_text_compare_in_nothing(runs: list[Path]) -> None:
    def other_words_and_text(result: dict[str, Any]) -> None:
        result["data"]["vocabulary_sha256"] = "x"
        result["data"]["splits"]["test"]["text_sha256"] = "x"
        result["evaluation"]["test"]["unknown_share"] = 0.5

    assert changed(runs, other_words_and_text).warnings == [
        "The runs were evaluated on different texts: do not compare perplexities or bits per byte.",
        "The runs have different vocabularies: do not compare perplexities.",
    ]


def test_an_unk_that_stands_in_the_text_is_no_difference(recipe_file: Path, tmp_path: Path) -> None:
    """It is one token of words and of subwords alike, though another share of them."""
    pytest.importorskip("tokenizers")
    texts = tmp_path / "texts"
    texts.mkdir()
    for split, lines in (("train", 200), ("valid", 40), ("test", 40)):
        (texts / f"{split}.txt").write_text("strawberries <unk> unbelievable\n" * lines)
    train_subwords([texts / "train.txt"], 262).save(tmp_path / "bpe.json")
    plain = {**PLAIN, "train": SHORT}
    train(recipe_file, out=tmp_path / "words", data=texts, **plain)
    train(
        recipe_file, out=tmp_path / "bpe", data={"corpus": str(texts), "tokenizer": str(tmp_path / "bpe.json")}, **plain
    )
    comparison = compare_runs([tmp_path / "words", tmp_path / "bpe"])
    shares = [run.evaluation("test")["unknown_share"] for run in comparison.runs]
    assert shares[0] == 0.25
    assert 0 < shares[1] < 0.1
    assert comparison.warnings[0].endswith("do not compare perplexities; compare bits per byte instead.")
    assert not any("<unk>" in warning for warning in comparison.warnings)
    assert any(
        "equally many tokens, but on different amounts of text: from" in warning for warning in comparison.warnings
    )


def test_a_context_model_that_shrank_with_the_map_is_named_with_the_cure(recipe_file: Path, tmp_path: Path) -> None:
    unit = {"kind": "projection", "embedding_dim": 16}
    narrow = {**PLAIN, "embedding": {"kind": "standard", "map_dim": 4}, "unit": unit, "train": SHORT}
    train(recipe_file, out=tmp_path / "wide", **PLAIN, train=SHORT)
    train(recipe_file, out=tmp_path / "narrow", **narrow)
    train(recipe_file, out=tmp_path / "cured", context={"output_dim": 16}, **narrow)
    comparison = compare_runs([tmp_path / "wide", tmp_path / "narrow"])
    counts = {run.name: run.parameters["context"] / 1e6 for run in comparison.runs if run.parameters}
    assert comparison.warnings == [
        f"The context models differ in size: {counts['wide']:.3f} M parameters in wide, {counts['narrow']:.3f} M in "
        "narrow. The last layer of a tied LSTM is as wide as embedding.map_dim; to compare embeddings alone, give all "
        "runs --context.output_dim 16."
    ]
    assert compare_runs([tmp_path / "wide", tmp_path / "cured"]).warnings == []


def test_settings_that_differ_beside_the_embedding_are_named(runs: list[Path]) -> None:
    """But not those that decide nothing, nor the steps where the numbers of tokens say it already."""
    first, second = compare_runs(runs).runs
    recipe = second.recipe
    recipe = dataclasses.replace(
        recipe,
        unit=dataclasses.replace(recipe.unit, depth=4),
        optim=dataclasses.replace(recipe.optim, lr=0.1),
        context=dataclasses.replace(recipe.context, input_dropout=0.5),
        train=dataclasses.replace(recipe.train, log_every=1, checkpoint_every=3, steps=30),
    )
    other = dataclasses.replace(second, recipe=recipe)
    named = "context.input_dropout (0.2, 0.5), optim.lr (0.005, 0.1)"
    sentence = "Settings other than those of embedding and output differ: "
    assert Comparison([first, other]).warnings == [f"{sentence}{named}, train.steps (20, 30)."]
    assert second.result is not None
    longer = dataclasses.replace(other, result={**second.result, "tokens": 999_999})
    assert Comparison([first, longer]).warnings == [
        f"The runs were trained on different numbers of tokens, from {first.fact('tokens'):,} to 999,999.",
        f"{sentence}{named}.",
    ]
    everything = {f.name: 0.5 for f in dataclasses.fields(recipe.context) if f.name.endswith("dropout")}
    context = dataclasses.replace(recipe.context, **everything)
    loss = dataclasses.replace(recipe.loss, output_dropout=0.5)
    many = dataclasses.replace(second, recipe=dataclasses.replace(recipe, context=context, loss=loss))
    (warning,) = Comparison([first, many]).warnings
    assert warning.endswith(" and 1 more.")
    batches = dataclasses.replace(second.recipe, train=dataclasses.replace(second.recipe.train, batch_size=8))
    other = dataclasses.replace(second, recipe=batches)
    assert Comparison([first, other]).warnings == [f"{sentence}train.batch_size (4, 8)."]


def test_ways_to_train_are_named_wherever_they_stand(runs: list[Path]) -> None:
    first, second = compare_runs(runs).runs
    loss = dataclasses.replace(second.recipe.loss, label_smoothing=0.3)
    embedding = dataclasses.replace(second.recipe.embedding, row_dropout=0.5)
    other = dataclasses.replace(second, recipe=dataclasses.replace(second.recipe, loss=loss, embedding=embedding))
    (warning,) = Comparison([first, other]).warnings
    assert "embedding.row_dropout (0.1, 0.5), loss.label_smoothing (0.0, 0.3)" in warning


def test_the_precision_that_was_computed_in_counts(runs: list[Path], recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, out=tmp_path / "bf16", device="cpu", train={"precision": "bf16", "steps": 20})
    assert compare_runs([runs[0], tmp_path / "bf16"]).warnings == []

    def on_a_gpu(result: dict[str, Any]) -> None:
        result["precision"] = "bf16"

    (warning,) = changed(runs, on_a_gpu).warnings
    assert "train.precision (fp32, bf16)" in warning


def test_a_translator_beside_a_language_model(runs: list[Path]) -> None:
    first, second = compare_runs(runs).runs
    translator = dataclasses.replace(second, recipe=dataclasses.replace(load_recipe("tatoeba/laptop")))
    comparison = Comparison([first, translator])
    (warning,) = comparison.warnings
    assert warning.startswith("The runs are of different tasks (language, translation)")
    assert marks(comparison) == []


def test_an_unfinished_run_is_shown_as_such(runs: list[Path], recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(
            recipe_file,
            out=tmp_path / "early",
            train={"seed": 1, "steps": 20, "eval_every": 5},
            reporter=StopAt(7, signal.SIGTERM),
        )
    comparison = compare_runs([*runs, tmp_path / "early"])
    assert column(comparison, "run") == ["seed-1", "seed-2", "early (unfinished)"]
    assert column(comparison, "test")[2] == "–"
    assert column(comparison, "valid")[2] == f"{comparison.runs[2].perplexity('valid'):,.2f}"  # and never the best
    assert "early is not finished: its log ends at step 7" in comparison.warnings[-1]
    assert [run["finished"] for run in comparison.to_dict()["runs"]] == [True, True, False]
    for reached in (1.0, comparison.best["valid"]):
        valid = [{"step": 5, "perplexity": reached}, {"step": 10, "perplexity": 99.0}]
        early = dataclasses.replace(comparison.runs[2], valid=valid)
        *finished, unfinished = column(Comparison([*comparison.runs[:2], early]), "valid")
        assert sorted(cell.endswith("*") for cell in finished) == [False, True]
        assert unfinished == f"{reached:.2f}"
        assert marks(Comparison([comparison.runs[0], early])) == []


def test_a_perplexity_that_is_not_finite_is_called_so(runs: list[Path], tmp_path: Path) -> None:
    shutil.copytree(runs[1], tmp_path / "infinite")
    path = tmp_path / "infinite" / "result.json"
    write_sealed(path, {**json.loads(path.read_text()), "test_perplexity": None})
    comparison = compare_runs([runs[0], tmp_path / "infinite"])
    assert comparison.runs[1].perplexity("test") == math.inf
    assert column(comparison, "test")[1] == "not finite"
    assert column(comparison, "test")[0].endswith("*")
    assert marks(compare_runs([tmp_path / "infinite"] * 2)) == ["valid"]


def column(comparison: Comparison, name: str) -> list[str]:
    return [row[comparison.columns.index(name)] for row in comparison.rows()]


def marks(comparison: Comparison) -> list[str]:
    """The columns in which something is marked as the best."""
    return [name for name in comparison.columns if any(cell.endswith("*") for cell in column(comparison, name))]


def changed(runs: list[Path], change: Callable[[Any], None]) -> Comparison:
    """Two finished runs, the second with another result."""
    first, second = compare_runs(runs).runs
    other: RunSummary = copy.deepcopy(second)
    change(other.result)
    return Comparison([first, other])


@pytest.mark.parametrize("skip", ["mix", "concat", "none"])
def test_a_plan_can_be_drawn(skip: str) -> None:
    plan = make_plan(32, UnitConfig(embedding_dim=64, expand_dim=128, depth=4, skip=skip))
    figure = draw_plan(plan)
    boxes = figure.axes[0].patches
    groups = sum(layer.groups for layer in plan)
    assert len(boxes) > groups
    labels = {text.get_text().split("\n")[0] for text in figure.axes[0].texts}
    assert {"map", "expand 1", "reduce 4"} <= labels
