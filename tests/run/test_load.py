"""What can be asked of a run: that it names itself, and that it reads single files."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torchdefine import Run, load_run, train
from torchdefine.cli import main
from torchdefine.data import SubwordTokenizer
from torchdefine.errors import UserError
from torchdefine.output import AdaptiveTableSoftmax
from torchdefine.tasks.sampling import SamplingOptions
from torchdefine.training.progress import watched


@pytest.fixture(scope="module")
def run(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(recipe_file, out=tmp_path_factory.mktemp("runs") / "run", train={"steps": 40})


def test_a_run_names_itself_in_one_line(run: Run, recipe_file: Path, tmp_path: Path) -> None:
    result = run.result
    parameters = f"{result['parameters']['total']:,}"
    measured = f"test perplexity {result['test_perplexity']:,.2f}"
    assert repr(run) == str(run) == f"Run({run.folder.path}: tiny, {parameters} parameters, {measured})"
    (moved := tmp_path / "result.json").write_bytes(run.folder.result.read_bytes())
    run.folder.result.unlink()
    assert repr(load_run(run.folder.path)).endswith(f"{parameters} parameters, not finished)")
    run.folder.result.write_bytes(moved.read_bytes())


def test_a_single_file_is_a_test_text(run: Run, corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "anything.txt"
    file.write_bytes((corpus / "test.txt").read_bytes())
    assert run.evaluate(data=file) == run.evaluate("test")
    assert run.unigram_perplexity(data=file) == pytest.approx(run.result["test_unigram_perplexity"], rel=1e-9)
    assert run.unigram_perplexity("valid") == pytest.approx(run.result["valid_unigram_perplexity"], rel=1e-9)
    for ask in (lambda: run.evaluate("valid", data=file), lambda: run.tune_cache(data=file)):
        with pytest.raises(
            UserError, match=r"anything\.txt is a single file, which is read as a test text, not as valid"
        ):
            ask()


def test_subwords_are_counted_too(recipe_file: Path, corpus: Path, tmp_path: Path) -> None:
    from torchdefine.data import train_subwords

    tokenizer = train_subwords([corpus / "train.txt"], 300).save(tmp_path / "bpe.json")
    trained = train(recipe_file, out=tmp_path / "run", data={"tokenizer": str(tokenizer)}, train={"steps": 5})
    run = load_run(trained.folder.path)
    counts = run.token_counts()
    assert counts is not None
    assert sum(counts) == run.result["data"]["splits"]["train"]["tokens"]
    (other := tmp_path / "other.txt").write_text("w1 w2 w3\n")
    for split in ("valid", "test"):
        known = run.result[f"{split}_unigram_perplexity"]
        assert run.unigram_perplexity(split) == pytest.approx(known, rel=1e-9)
    assert run.unigram_perplexity(data=other) is not None

    run.folder.token_counts.unlink()  # as if it had been killed just before they were written
    run.folder.result.unlink()
    train(out=run.folder.path, resume=True)
    assert run.token_counts() == counts


def test_bands_of_subwords_go_by_frequency_in_one_table_too(recipe_file: Path, corpus: Path, tmp_path: Path) -> None:
    from torchdefine.data import train_subwords

    tokenizer = train_subwords([corpus / "train.txt"], 300).save(tmp_path / "bpe.json")
    trained = train(
        recipe_file,
        out=tmp_path / "run",
        data={"tokenizer": str(tokenizer)},
        embedding={"kind": "standard", "map_dim": 16, "row_dropout": 0.1},
        output={"kind": "adaptive-table", "cutoffs": [40, 100]},
        train={"steps": 5},
    )
    counts = torch.tensor(trained.token_counts())
    layer = trained.model.output
    assert isinstance(layer, AdaptiveTableSoftmax)
    assert layer.ranks is not None
    assert counts[layer.ranks < 40].min() >= counts[layer.ranks >= 40].max()
    loaded = load_run(trained.folder.path)
    assert torch.equal(loaded.model.output.ranks, layer.ranks)
    assert loaded.evaluate("test") == trained.evaluate("test")


@pytest.mark.parametrize("page", ["data", "evaluation"])
def test_the_code_of_the_pages_on_training_runs(
    page: str, run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_texts").symlink_to(corpus)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(run.folder.path)
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "docs"})
    assert page != "data" or len(SubwordTokenizer.load("bpe.json")) > 260


def test_a_text_without_a_name_is_not_the_runs_own(run: Run) -> None:
    for ask in (run.evaluate, run.unigram_perplexity):
        with pytest.raises(UserError, match="The corpus is empty text"):
            ask(data="")


def test_arguments_that_were_mixed_up_are_told_apart(run: Run, corpus: Path) -> None:
    text = str(corpus / "test.txt")
    for ask in (run.evaluate, run.unigram_perplexity):
        with pytest.raises(UserError) as refusal:
            ask(text)
        assert str(refusal.value) == (
            f"The split {text!r} is unknown: use train, valid or test, and name a text of your own by data (--data)."
        )
    with pytest.raises(UserError, match="The prompt is 5, but must be text; the length sets how many tokens to draw"):
        run.generate(5)
    for length in ("20", 2.5):
        with pytest.raises(UserError, match=rf"The length is {length!r}, but must be a whole number of at least 1\."):
            run.generate("w1", length)
    assert run.generate("w1", np.int64(3), seed=1) == run.generate("w1", 3, seed=1)


def test_a_prompt_that_ends_a_line_is_continued_by_another(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(
        "torchdefine.tasks.language.run.generate", lambda model, ids, *arguments, **options: read.append(ids) or []
    )
    for prompt in ("", "w1 w2", "w1 w2\n", "w1\nw2", "\n"):
        run.generate(prompt)
    end, one, two = run.tokenization.eos_id, *map(run.tokenization.id, ("w1", "w2"))
    assert read == [[end], [end, one, two], [end, one, two, end], [end, one, end, two], [end, end]]


def test_an_unknown_word_is_never_drawn(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "torchdefine.tasks.language.run.generate", lambda model, ids, length, options, **_: asked.append(options) or []
    )
    run.generate("w1")
    with pytest.raises(SystemExit):
        main(["generate", str(run.folder.path), "--top-k", "5", "--top-p", "0.5", "--temperature", "0.3"])
    unknown = (run.tokenization.unk_id,)
    assert asked == [SamplingOptions(forbidden=unknown), SamplingOptions(0.3, 5, 0.5, unknown)]


def test_training_is_shown_to_whoever_is_there(
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("WARNING", logger="torchdefine")  # as in a program that has set up no logging
    short = {"train": {"steps": 5}}
    assert not watched()
    train(recipe_file, out=tmp_path / "quiet", **short)
    assert "validation perplexity" not in "".join(capsys.readouterr())

    train(recipe_file, out=tmp_path / "verbose", device="cpu", verbose=True, train={"steps": 5, "precision": "bf16"})
    shown = capsys.readouterr()
    assert "The precision bf16 is for GPUs; on the cpu this run computes in fp32." in shown.err
    assert "Without effect" not in shown.err
    assert shown.out == ""
    assert "The training text has" in shown.err
    assert "The vocabulary has 62 entries: all 60 different words" in shown.err
    assert shown.err.count("validation perplexity") == 5

    class Notebook:
        get_ipython = staticmethod(lambda: "a shell")

    monkeypatch.setitem(sys.modules, "IPython", Notebook)
    assert watched()
    train(recipe_file, out=tmp_path / "notebook", **short)
    assert capsys.readouterr().out.count("validation perplexity") == 5
    train(recipe_file, out=tmp_path / "hushed", verbose=False, **short)
    assert "validation perplexity" not in "".join(capsys.readouterr())


def test_opening_a_run_changes_nobodys_random_numbers(run: Run) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load_run(run.folder.path)
    assert torch.equal(torch.rand(2), expected)


def test_opening_a_run_leaves_the_process_as_it_is(run: Run) -> None:
    torch.set_flush_denormal(False)
    try:
        load_run(run.folder.path)
        assert float(torch.tensor([1e-39]) * 0.5) > 0
    finally:
        torch.set_flush_denormal(True)
