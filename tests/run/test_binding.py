"""The files of a run belong to each other, and no file of another run takes the place of one."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchdefine import load_run, train
from torchdefine.errors import MachineError, UserError
from torchdefine.run import RunFolder
from torchdefine.training.progress import Reporter


@pytest.fixture(scope="module")
def twins(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the same recipe, text and vocabulary."""
    folder = tmp_path_factory.mktemp("twins")
    for name in ("one", "other"):
        train(recipe_file, out=folder / name, train={"steps": 6, "checkpoint_every": 3})
    return folder / "one", folder / "other"


@pytest.fixture
def copy(twins: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(twins[0], tmp_path / "copy")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["best/checkpoint.safetensors", "last/checkpoint.safetensors"])
def test_the_weights_of_another_run_are_refused(twins: tuple[Path, Path], copy: Path, name: str) -> None:
    shutil.copy(twins[1] / name, copy / name)
    with pytest.raises(UserError, match=r"belongs to another run than that in .*copy: put the run's own file back"):
        load_run(copy, checkpoint=name.split("/")[0])


def test_the_result_and_the_log_of_another_run_are_refused(
    twins: tuple[Path, Path], copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(twins[1] / "result.json", copy / "result.json")
    with pytest.raises(UserError, match=r"result\.json belongs to another run"):
        _ = load_run(copy).result
    own = RunFolder(copy).records()
    assert len(own) > 2
    assert not caplog.text
    shutil.copy(twins[1] / "log.jsonl", copy / "log.jsonl")
    assert RunFolder(copy).records() == []
    assert f"{len(own)} lines are damaged, or of another run, and are left out" in caplog.text


def test_settings_that_were_changed_under_the_weights_are_refused(copy: Path) -> None:
    config = copy / "config.yaml"
    text = config.read_text()
    (copy / "result.json").unlink()
    changes = [r"(?<=scaled: )false", r"(?<=  lr: )[\d.]+", r"(?<=valid_batch_size: )\w+", r"(?<=seed: )1"]
    for change, value in zip(changes, ("true", "0.5", "3", "2"), strict=True):
        changed, count = re.subn(change, value, text, count=1)
        if count and changed != text:
            config.write_text(changed)
            before = files_of(copy)
            for use in (lambda: load_run(copy), lambda: train(out=copy, resume=True)):
                with pytest.raises(UserError, match=r"was trained with other settings than those in .*restore config"):
                    use()
            assert files_of(copy) == before
    config.write_text(text.replace("name: ", "name: my-"))  # names and paths may change
    assert load_run(copy).model is not None


def test_counts_of_words_that_were_changed_are_refused(copy: Path) -> None:
    vocabulary = copy / "vocab.txt"
    header, first, *rest = vocabulary.read_text().split("\n")
    vocabulary.write_text("\n".join([header, f"{first}0", *rest]))
    with pytest.raises(UserError, match="other counts of words"):
        load_run(copy)


def flips(path: Path) -> list[Callable[[], None]]:
    whole = path.read_bytes()

    def flip(at: int) -> None:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 7
        path.write_bytes(flipped)

    return [lambda at=at: flip(at) for at in range(0, len(whole), max(1, len(whole) // 40))]


@pytest.mark.parametrize(
    "name", ["best/checkpoint.safetensors", "last/checkpoint.safetensors", "result.json", "vocab.txt"]
)
def test_no_flipped_bit_changes_a_number(copy: Path, name: str) -> None:
    (copy / "token_counts.json").write_text("{}")
    run = load_run(copy)
    wanted = run.evaluate("test").perplexity, run.result
    for flip in flips(copy / name):
        flip()
        try:
            run = load_run(copy, checkpoint=name.split("/")[0] if "/" in name else "best")
            found = run.evaluate("test").perplexity, run.result
        except UserError:
            continue
        assert found == wanted


class Removes(Reporter):
    def __init__(self, folder: Path, replace_by: Path | None) -> None:
        self.folder, self.other = folder, replace_by

    def started(self, done_steps: int, total_steps: int) -> None:
        shutil.rmtree(self.folder)
        if self.other:
            shutil.copytree(self.other, self.folder)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_that_is_removed_while_it_trains_does_not_come_back(
    recipe_file: Path, tmp_path: Path, twins: tuple[Path, Path], replaced: bool
) -> None:
    out = tmp_path / "run"
    with pytest.raises(MachineError, match="was removed or replaced while it was in use"):
        train(recipe_file, out=out, train={"steps": 6}, reporter=Removes(out, twins[1] if replaced else None))
    assert (files_of(out) == files_of(twins[1])) if replaced else not out.exists()


def test_processes_with_other_caches_do_not_train_in_one_folder(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, refused = tmp_path / "run", []

    class Second(Reporter):
        def started(self, done_steps: int, total_steps: int) -> None:
            with monkeypatch.context() as other:
                other.setenv("TORCHDEFINE_CACHE", str(tmp_path / "cache"))
                try:
                    train(out=out, resume=True, train={"steps": 6})
                except UserError as error:
                    refused.append(str(error))

    run = train(recipe_file, out=out, train={"steps": 6}, reporter=Second())
    assert len(refused) == 1
    assert "Another process is training in" in refused[0]
    assert run.result["steps"] == 6


def test_training_and_loading_leave_the_callers_random_numbers_and_device_alone(
    recipe_file: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    train(recipe_file, out=tmp_path / "run", train={"steps": 2})
    assert torch.equal(torch.rand(3), wanted)
    perplexity = load_run(tmp_path / "run").evaluate("test").perplexity
    with torch.device("meta"):
        run = load_run(tmp_path / "run")
    assert run.evaluate("test").perplexity == perplexity


def test_facts_of_a_checkpoint_are_sealed(copy: Path) -> None:
    """A single letter of them, of the same length, is noticed."""
    file = copy / "last" / "checkpoint.safetensors"
    whole = file.read_bytes()
    changed = whole.replace(rb"\"step\": 6", rb"\"step\": 5", 1)
    assert changed != whole
    file.write_bytes(changed)
    (copy / "result.json").unlink()
    with pytest.raises(UserError, match="its header is not what was written"):
        train(out=copy, resume=True)
    assert file.read_bytes() == changed
