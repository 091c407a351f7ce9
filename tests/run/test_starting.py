"""What a run starts with: recipes, changes and folders, and the sentences about those that do not fit."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.training.test_loop import StopAt, assert_same_run

from torchdefine import load_run, train
from torchdefine.data import encode_corpus
from torchdefine.errors import UserError
from torchdefine.recipe import load_recipe, recipe_names
from torchdefine.run import RunFolder
from torchdefine.training import Interrupted


def test_a_run_goes_on_without_its_recipe_being_named(recipe_file: Path, tmp_path: Path) -> None:
    changes = {"optim": {"lr": 0.01}, "train": {"steps": 30}}
    train(recipe_file, out=tmp_path / "whole", **changes)
    with pytest.raises(Interrupted, match=r"Stopped at step 14; continue the run in .*broken with resume"):
        train(recipe_file, out=tmp_path / "broken", reporter=StopAt(14, signal.SIGTERM), **changes)
    run = train(out=tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    assert run.result["overrides"] == changes
    assert run.result["recipe"] == str(recipe_file)


def test_settings_that_a_run_has_already_change_nothing_of_it(recipe_file: Path, tmp_path: Path) -> None:
    changes = {"optim": {"lr": 0.01}, "train": {"steps": 30, "eval_every": 15}}
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path, reporter=StopAt(14, signal.SIGTERM), **changes)
    result = train(out=tmp_path, resume=True, train={"steps": 30}).result
    assert result["overrides"] == changes
    assert [record["step"] for record in result["curve"]] == [15, 30]
    for name, before, now in (("eval_every", 15, 5), ("seed", 1, 2)):
        with pytest.raises(UserError, match=rf"another train\.{name} \({before}, not {now}\)"):
            train(out=tmp_path, resume=True, train={name: now})


def test_paths_that_no_file_can_name_are_refused_before_training(
    recipe_file: Path, corpus: Path, tmp_path: Path
) -> None:
    """Nothing could be kept in such a folder, and no result could be written of such a text."""
    strange = tmp_path / os.fsdecode(b"strange-\xff")
    with pytest.raises(UserError, match=r"The path '.*strange-\\udcff' is not in UTF-8, .*: rename it, or choose"):
        train(recipe_file, out=strange)
    assert not strange.exists()
    shutil.copytree(corpus, strange)
    with pytest.raises(UserError, match=r"strange-\\udcff' is not in UTF-8"):
        train(recipe_file, data=strange, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_after_its_text_was_moved(recipe_file: Path, corpus: Path, tmp_path: Path) -> None:
    first, second = (shutil.copytree(corpus, tmp_path / name) for name in ("first", "second"))
    train(recipe_file, data=first, out=tmp_path / "whole", train={"steps": 30})
    with pytest.raises(Interrupted):
        train(recipe_file, data=first, out=tmp_path / "run", reporter=StopAt(14, signal.SIGTERM), train={"steps": 30})
    shutil.rmtree(first)
    with pytest.raises(UserError, match="neither a folder nor a corpus"):
        train(out=tmp_path / "run", resume=True)
    (second / "train.txt").write_text((corpus / "train.txt").read_text() + "w1\n")
    with pytest.raises(UserError, match="The training text has changed"):
        train(out=tmp_path / "run", data=second, resume=True)
    assert RunFolder(tmp_path / "run").recipe().data.corpus == str(first)
    shutil.copy(corpus / "train.txt", second)
    (second / "valid.txt").write_text((corpus / "valid.txt").read_text() + "w1\n")
    with pytest.raises(UserError, match="The validation text has changed"):
        train(out=tmp_path / "run", data=second, resume=True)
    shutil.copy(corpus / "valid.txt", second)
    vocabulary = tmp_path / "run" / "vocab.txt"
    vocabulary.write_text(vocabulary.read_text().replace("w7\t", "w777\t"))  # mended by what the weights know
    run = train(out=tmp_path / "run", data=second, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert run.folder.recipe().data.corpus == str(second)
    assert load_run(run.folder.path).evaluate().perplexity == pytest.approx(run.result["test_perplexity"], rel=1e-6)


def test_tokens_that_were_damaged_in_the_cache_are_encoded_again(
    recipe_file: Path, corpus: Path, tmp_path: Path
) -> None:
    text = shutil.copytree(corpus, tmp_path / "text")
    file = encode_corpus(text).splits["train"].path
    sound = file.read_bytes()
    tokens = bytearray(sound)
    tokens[-2] ^= 1  # another word of the vocabulary
    file.write_bytes(tokens)
    train(recipe_file, data=text, out=tmp_path / "run", train={"steps": 5})
    assert file.read_bytes() == sound
    folder = encode_corpus(text, out=tmp_path / "tokens").folder
    (folder / "train.tokens").write_bytes(tokens)
    with pytest.raises(UserError, match="its tokens are not those that were written"):
        train(recipe_file, data=folder, out=tmp_path / "other", train={"steps": 5})
    assert not (tmp_path / "other").exists()


def test_without_a_checkpoint_to_tell_texts_apart_another_place_is_refused(
    recipe_file: Path, corpus: Path, tmp_path: Path
) -> None:
    changes = {"train": {"steps": 30, "checkpoint_every": 30}}
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path / "run", reporter=StopAt(7, signal.SIGTERM), **changes)
    RunFolder(tmp_path / "run").last.unlink()
    elsewhere = shutil.copytree(corpus, tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"was started with another data\.corpus"):
        train(out=tmp_path / "run", data=elsewhere, resume=True)


def test_a_run_that_wrote_no_checkpoint_keeps_what_was_changed(recipe_file: Path, tmp_path: Path) -> None:
    changes = {"train": {"steps": 30, "checkpoint_every": 30}}
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path, reporter=StopAt(7, signal.SIGTERM), **changes)
    RunFolder(tmp_path).last.unlink()
    assert train(out=tmp_path, resume=True).result["overrides"] == changes


def test_a_second_end_before_the_first_step_leaves_what_was_changed(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train": {"steps": 30, "checkpoint_every": 30}}
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path, reporter=StopAt(7, signal.SIGTERM), **changes)
    RunFolder(tmp_path).last.unlink()
    with monkeypatch.context() as killed:
        killed.setattr(RunFolder, "log", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(out=tmp_path, resume=True)
    assert train(out=tmp_path, resume=True).result["overrides"] == changes


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_finished_run_says_that_it_was(
    recipe_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    caplog.set_level("INFO", logger="torchdefine")
    result = train(recipe_file, out=tmp_path / "run", train={"steps": 5}).result
    assert "already finished" not in caplog.text
    caplog.clear()
    assert train(out=tmp_path / "run", resume=True).result == result
    (said,) = caplog.messages
    assert said.startswith(f"The run in {tmp_path / 'run'} is already finished, so nothing is trained. ")
    caplog.set_level("WARNING", logger="torchdefine")
    train(out=tmp_path / "run", resume=True, verbose=True)
    assert said in capsys.readouterr().err


def test_every_setting_that_differs_is_named(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, out=tmp_path / "run", train={"steps": 5})
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    for recipe in (recipe_file, None):
        with pytest.raises(UserError) as caught:
            train(recipe, out=tmp_path / "run", resume=True, optim={"lr": 0.5, "clip": 2.0}, train={"steps": 5})
        differing = "optim.lr (0.005, not 0.5), optim.clip (1.0, not 2.0)"
        assert f"was started with another {differing}: resume it" in str(caught.value)
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
    with pytest.raises(UserError, match=r"Name a recipe to train, or go on with a run by resume \(--resume\)"):
        train(out=tmp_path / "run")
    with pytest.raises(UserError, match="holds no run"):
        train(out=tmp_path / "nothing", resume=True)


def test_a_run_has_a_folder_of_its_own(recipe_file: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("mine")
    with pytest.raises(UserError, match=r"thesis holds chapter\.tex already, but no run: choose another out \(--out\)"):
        train(recipe_file, out=thesis)
    assert [file.name for file in thesis.iterdir()] == ["chapter.tex"]
    (tmp_path / "empty").mkdir()
    assert train(recipe_file, out=tmp_path / "empty", train={"steps": 5}).result["steps"] == 5
    with pytest.raises(
        UserError, match=r"chapter\.tex/run/config\.yaml could not be written \(Not a directory\): choose a folder"
    ):
        train(recipe_file, out=thesis / "chapter.tex" / "run", train={"steps": 5})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": 1}, r"lr is no section of a recipe: did you mean optim=\{'lr': 1\}\?"),
        ({"learning_rate": 1}, r"did you mean optim=\{'lr': 1\}\?"),
        ({"max_length": 9}, r"did you mean context=\{'same_length': 9\}\?"),
        ({"optm": {"lr": 1}}, "'optm.lr' is unknown: did you mean 'optim.lr'"),
        ({"zebra": 1}, "zebra is no section of a recipe: use one of data, embedding, unit, context,"),
        ({"optim": {"learning_rate": 1}}, "'optim.learning_rate' is unknown: did you mean 'optim.lr'"),
        ({"optim": {"wd": 1}}, "'optim.wd' is unknown: did you mean 'optim.weight_decay'"),
        ({"optim": 1}, r"optim holds several settings, so it cannot be 1: use optim\.NAME"),
        ({"resume": True}, r"say which: pass its folder as out \(--out\)"),
    ],
)
def test_python_is_answered_in_python(recipe_file: Path, arguments: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(recipe_file, **arguments)


def test_chosen_steps_have_five_validations(recipe_file: Path, tmp_path: Path) -> None:
    def validated(**changes: dict) -> list[int]:
        changes["train"] |= {"log_every": 50}
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return [record["step"] for record in train(recipe_file, out=out, **changes).result["curve"]]

    assert validated(train={"steps": 23}) == [5, 10, 15, 20, 23]
    assert validated(train={"steps": 23, "eval_every": 20}) == [20, 23]
    assert validated(train={"steps": 23, "eval_every": 0}) == [5, 10, 15, 20, 23]  # less than an epoch
    assert validated(train={"steps": 23, "eval_every": 0}, schedule={"kind": "plateau"}) == [23]  # it goes by them
    assert validated(train={"steps": 4, "batch_size": 40, "length": 20, "eval_every": 0}) == [4]  # an epoch
    assert validated(train={"epochs": 0.5, "eval_every": 0}) == [41]
    assert load_recipe("demo/standard", {"train": {"steps": "300"}}).train.eval_every == 60
    assert load_recipe("demo/standard", {"train": {"steps": 5000}}).train.eval_every == 250
    for by_validations in (
        {"schedule": {"kind": "plateau"}},
        {"averaging": "stalled"},
        {"train": {"steps": 300, "early_stopping": 5}},
    ):
        assert load_recipe("demo/standard", {"train": {"steps": 300}, **by_validations}).train.eval_every == 250


def test_shipped_recipes_validate_as_they_say() -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        assert load_recipe(name, {"optim": {"lr": 1.0}}).train == recipe.train


def test_a_group_of_recipes_is_not_one() -> None:
    with pytest.raises(UserError, match="'demo' is no recipe, but some begin so: name one of demo/adaptive-define, "):
        load_recipe("demo")
    with pytest.raises(UserError, match=r"'demo/' is no recipe, .*, demo/standard-scaled\.$"):
        load_recipe("demo/")
    with pytest.raises(UserError, match=r"'table1a' is no recipe, .*: name one of table1a/r1, "):
        load_recipe("table1a")
