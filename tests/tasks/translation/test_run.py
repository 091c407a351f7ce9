import gzip
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")

from torchdefine import cli, load_run, train
from torchdefine.errors import UserError
from torchdefine.files import write_sealed
from torchdefine.run import Run
from torchdefine.run.checkpoint_file import read_checkpoint
from torchdefine.tasks.sampling import SamplingOptions
from torchdefine.tasks.translation import BeamConfig, TranslationOptions
from torchdefine.training import Interrupted
from torchdefine.training.progress import Reporter


@pytest.fixture(scope="module")
def run(translation_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(translation_recipe, out=tmp_path_factory.mktemp("runs") / "whole", device="cpu")


def command(*arguments: str, stdin: bytes = b"", monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def test_the_loop_teaches_a_translator(run: Run) -> None:
    result = run.result
    assert result["test_bleu"] > 20
    assert result["test_chrf"] > 40
    assert result["test_perplexity"] < 3
    assert result["evaluation"]["test"]["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert "a beam of 2, length penalty 0.6" in result["evaluation"]["test"]["protocol"]
    assert len(result["translations"]) == 10
    assert result["data"]["splits"]["train"]["pairs"] == 400
    assert result["tokens"] > 200 * 150


@pytest.mark.parametrize("missing", [["tokenizers"], ["sacrebleu"], ["tokenizers", "sacrebleu"]])
def test_all_missing_packages_are_named_before_any_work(
    missing: list[str], translation_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("torchdefine.tasks.translation.task.encode_bitext", pytest.fail)
    with pytest.raises(UserError, match=rf"needs {' and '.join(missing)}, for subwords .* 'torchdefine\[mt\]'"):
        train(translation_recipe, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


class StopAt(Reporter):
    """Asks the run to stop at a step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def trained(self, record: dict) -> None:
        if record["step"] == self.step:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)


def test_a_stopped_run_goes_on_to_the_same_weights(run: Run, translation_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="Stopped at step 70"):
        train(translation_recipe, out=tmp_path / "run", device="cpu", reporter=StopAt(70))
    resumed = train(translation_recipe, out=tmp_path / "run", device="cpu", resume=True)
    one, other = (read_checkpoint(r.folder.last, only="model").tensors for r in (run, resumed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert resumed.result["test_bleu"] == run.result["test_bleu"]
    assert [r["loss"] for r in resumed.result["curve"]] == [r["loss"] for r in run.result["curve"]]


def test_a_loaded_run_translates_alike_for_every_batch_size(run: Run) -> None:
    lines = ["one red house.", "", "   ", "two  two\ttwo.", "tree " * 400, "猫 \x85 x", "<eos> <pad> five", "six."]
    loaded = load_run(run.folder.path, device="cpu")
    together = loaded.translate(lines)
    assert len(together) == len(lines)
    assert [found[0].text for found in together[1:3]] == ["", ""]
    assert not any("\n" in found[0].text for found in together)
    alone = [loaded.translate([line])[0] for line in lines]
    assert [[t.text for t in found] for found in alone] == [[t.text for t in found] for found in together]
    for one, other in zip(alone, together, strict=True):
        assert [t.log_prob for t in one] == pytest.approx([t.log_prob for t in other], rel=1e-4, abs=1e-4)
    greedy = loaded.translate(lines, TranslationOptions(BeamConfig(1, batch_size=3)))
    drawn = loaded.translate(lines, TranslationOptions(BeamConfig(batch_size=2), SamplingOptions(0)))
    assert [found[0].text for found in greedy] == [found[0].text for found in drawn]


def test_commands_on_a_translator(
    run: Run, bitext_folder: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(run.folder.path)
    test, refs = bitext_folder / "test.en", str(bitext_folder / "test.de")
    assert command("translate", folder, "--refs", refs, stdin=test.read_bytes(), monkeypatch=monkeypatch) == 0
    shown = capfd.readouterr()
    assert shown.out.count("\n") == 30
    assert f"BLEU {run.result['test_bleu']:.2f}  nrefs:1|" in shown.err
    assert f"chrF {run.result['test_chrf']:.2f}  nrefs:1|" in shown.err

    options = ("--n-best", "2", "--beam", "3", "--json")
    assert command("translate", folder, "--input", str(test), *options, monkeypatch=monkeypatch) == 0
    found = json.loads(capfd.readouterr().out)["translations"]
    assert [len(best) for best in found] == [2] * 30
    assert all(best[0]["score"] >= best[1]["score"] for best in found)

    assert command("translate", folder, "--sample", "--seed", "3", stdin=b"one\n\ntwo", monkeypatch=monkeypatch) == 0
    assert capfd.readouterr().out.count("\n") == 3
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    for empty in (("--input", str(tmp_path / "empty.txt")), ("--input", str(tmp_path / "empty.gz")), ()):
        assert command("translate", folder, *empty, stdin=b"", monkeypatch=monkeypatch) == 0
        assert capfd.readouterr() == ("", "There are no lines to translate.\n")
    assert command("translate", folder, stdin=b"word " * 10_000 + b"\n\n", monkeypatch=monkeypatch) == 0
    shown = capfd.readouterr()
    assert shown.out.count("\n") == 2
    assert "Line 1 has" in shown.err

    assert command("eval", folder, "--json", monkeypatch=monkeypatch) == 0
    evaluated = json.loads(capfd.readouterr().out)
    assert evaluated["perplexity"] == pytest.approx(run.result["test_perplexity"], rel=1e-6)
    assert evaluated["bleu"] == pytest.approx(run.result["test_bleu"])
    assert command("average", folder, "--last", "2", "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capfd.readouterr().out)["averaged_steps"] == [150, 200]
    assert command("eval", folder, "--checkpoint", "average", monkeypatch=monkeypatch) == 0
    assert "BLEU" in capfd.readouterr().out
    assert command("params", folder, "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capfd.readouterr().out)["counts"] == run.result["parameters"]
    assert command("compare", folder, monkeypatch=monkeypatch) == 0
    assert "chrF" in capfd.readouterr().out


def test_translations_are_of_the_text_that_was_asked_for(run: Run, bitext_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(bitext_folder, other := tmp_path / "other")
    for language in ("en", "de"):
        lines = (other / f"valid.{language}").read_text(encoding="utf-8").splitlines()
        (other / f"test.{language}").write_text("\n".join(lines[::-1]) + "\n", encoding="utf-8")
    for folder, split, data in ((bitext_folder, "valid", None), (other, "test", other)):
        shown = run.evaluate(split, data=data).examples
        for side, language in (("source", "en"), ("reference", "de")):
            lines = (folder / f"{split}.{language}").read_text(encoding="utf-8").splitlines()
            assert [example[side] for example in shown] == lines[::3]


def test_misuse_is_refused_in_one_sentence(
    run: Run, bitext_folder: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, test = str(run.folder.path), str(bitext_folder / "test.en")
    short = tmp_path / "short.de"
    short.write_text("eins.\n")
    for arguments, stdin, message in (
        (
            ("translate", folder),
            b"fine\nnot \xff fine\n",
            "The standard input is not UTF-8 text: line 2 has the byte 0xff",
        ),
        (("translate", folder, "--input", test, "--refs", str(short)), b"", "has 1 lines, but 30 are to be translated"),
        (("translate", folder, "--n-best", "9"), b"one\n", "A beam of 2 cannot give the 9 best translations"),
        (("translate", folder, "--beam", "0"), b"one\n", "beam.size is 0"),
        (("translate", folder, "--top-k", "3"), b"one\n", "--top-k means nothing without --sample: leave it out."),
        (("translate", folder, "--seed", "3", "--temperature", "1"), b"one\n", "--temperature, --seed mean nothing"),
        (("translate", folder, "--sample", "--beam", "2"), b"one\n", "--beam means nothing to --sample"),
        (("translate", folder, "--batch-size", "0"), b"one\n", "beam.batch_size is 0"),
        (("translate", str(tmp_path)), b"one\n", "holds no run"),
        (("generate", folder), b"", "is a model for translation, which has no `generate`"),
        (("average", folder, "--last", "7"), b"", "has kept 3 checkpoints: average 2 to 3 of them"),
        (("eval", folder, "--length", "7"), b"", "--length means nothing to a model for translation"),
        (("eval", folder, "--batch-size", "0"), b"", "--batch-size means nothing to a model for translation"),
        (("eval", folder, "--memory", "7"), b"", "--memory means nothing to a model for translation"),
        (("eval", folder, "--clamp", "7"), b"", "--clamp means nothing to a model for translation"),
        (("eval", folder, "--split", "tset"), b"", "The split 'tset' is unknown: use train, valid or test"),
    ):
        assert command(*arguments, stdin=stdin, monkeypatch=monkeypatch) == 2, arguments
        shown = capfd.readouterr()
        assert shown.out == ""
        assert message in shown.err
        assert shown.err.count("\n") == 1


def test_one_split_is_evaluated_without_reading_the_others(run: Run, bitext_folder: Path, tmp_path: Path) -> None:
    for language in ("en", "de"):
        shutil.copy(bitext_folder / f"test.{language}", tmp_path)
    (tmp_path / "train.en").write_text("one\ntwo\n")
    (tmp_path / "train.de").write_text("eins\n")  # not line by line: reading it would end the evaluation
    evaluated = run.evaluate("test", data=tmp_path)
    assert evaluated.scores.bleu == run.result["test_bleu"]
    with pytest.raises(UserError, match="has no valid text: it has train, test"):
        run.evaluate("valid", data=tmp_path)


def test_comparison_and_report(run: Run, tmp_path: Path) -> None:
    from torchdefine.analysis.comparison import compare_runs

    comparison = compare_runs([run.folder.path])
    assert comparison.columns[-2:] == ["BLEU", "chrF"]
    assert comparison.rows()[0][-2] == f"{run.result['test_bleu']:.2f}"
    assert comparison.to_dict()["runs"][0]["test_chrf"] == run.result["test_chrf"]
    pytest.importorskip("matplotlib")
    from torchdefine.analysis.report import write_report

    write_report([run.folder.path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert run.result["translations"][0]["reference"] in page
    assert "Continuations" not in page


def test_a_run_that_kept_nothing_has_no_average(run: Run, tmp_path: Path, translation_recipe: Path) -> None:
    bare = train(translation_recipe, out=tmp_path / "bare", train={"keep": 0, "steps": 2}, device="cpu")
    with pytest.raises(UserError, match="has no average: make it with"):
        load_run(bare.folder.path, checkpoint="average")
    from torchdefine.run import average_run

    with pytest.raises(UserError, match="has kept 0 checkpoints, but an average needs two"):
        average_run(bare.folder.path)


@pytest.mark.gpu
def test_a_gpu_trains_and_translates_in_half_precision(translation_recipe: Path, tmp_path: Path) -> None:
    run = train(translation_recipe, out=tmp_path / "run", device="cuda", train={"precision": "bf16"})
    assert run.result["test_bleu"] > 20
    lines = ["one red house.", "", "six five four three two one."]
    on_cpu = load_run(run.folder.path, device="cpu").translate(lines)
    on_gpu = load_run(run.folder.path, device="cuda").translate(lines)
    assert [found[0].text for found in on_gpu] == [found[0].text for found in on_cpu]


def test_a_single_table_trains_without_validation(
    translation_recipe: Path, bitext_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [
        (bitext_folder / f"train.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de")
    ]
    rows = [f"{source}\t{target}\n" for source, target in zip(*sides, strict=True)]
    (tmp_path / "pairs.tsv").write_text("".join(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"train\.keep needs validations"):
        train(translation_recipe, data="pairs.tsv", out="run", train={"steps": 2})
    assert not Path("run").exists()
    run = train(translation_recipe, data="pairs.tsv", out="run", train={"steps": 2, "keep": 0}, device="cpu")
    assert run.result["evaluation"] == {}
    assert run.recipe.data.corpus == str((tmp_path / "pairs.tsv").resolve())  # to be found from anywhere
    assert len(load_run("run").translate(["one"])) == 1


def test_a_translator_without_best_weights_is_still_called_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    shutil.copytree(run.folder.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "best")
    assert command("generate", str(tmp_path / "run"), monkeypatch=monkeypatch) == 2
    message = capfd.readouterr().err
    assert "is a model for translation, which has no `generate`" in message


def test_cached_translation_says_the_same(run: Run) -> None:
    folder = str(run.folder.path)
    lines = ["the cat sees a dog", "a big house"]
    live = load_run(folder, device="cpu")
    written = live.cache()
    assert {file.name for file in written} == {f"cache-{name}.safetensors" for name in ("source", "target")}
    cached = load_run(folder, device="cpu", cached=True)
    for embedding in cached.model.embeddings().values():
        embedding.map.forward = None  # whoever calls it now fails
    assert [[t.text for t in line] for line in cached.translate(lines)] == [
        [t.text for t in line] for line in live.translate(lines)
    ]
    one, other = (run.evaluate("test").predicted.loss for run in (cached, live))
    assert one == pytest.approx(other, rel=1e-6)


def test_translating_says_when_a_model_has_learned_nothing(
    run: Run, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = tmp_path / "poor"
    shutil.copytree(run.folder.path, poor)
    result = json.loads((poor / "result.json").read_text())

    def said() -> str:
        assert command("translate", str(poor), stdin=b"one\n", monkeypatch=monkeypatch) == 0
        return capfd.readouterr().err

    assert said() == ""
    write_sealed(poor / "result.json", {**result, "test_bleu": 0.31})
    assert said() == (
        "The model has learned next to nothing: its BLEU on the test text is 0.31: train longer, or try another "
        "optim.lr.\n"
    )
    write_sealed(poor / "result.json", {**result, "valid_perplexity": 1e5})
    assert said().startswith("The model is worse than uniform guessing among the ")
    (poor / "result.json").unlink()
    assert said() == "The run is not finished: these are intermediate weights.\n"


def test_the_command_translates_by_cached_vectors(run: Run, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    load_run(run.folder.path, device="cpu").cache()
    assert command("translate", str(run.folder.path), "--cached", stdin=b"the cat\n", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_one_with_srus_resumes_translates_and_says_why_it_is_not_exported(
    translation_recipe: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    settings = {
        "context": {"feed_forward": "sru", "sru_dropout": 0.1},
        "train": {"steps": 20, "eval_every": 20, "log_every": 5, "checkpoint_every": 10, "keep": 0},
    }
    runs = [train(translation_recipe, out=tmp_path / "whole", device="cpu", **settings)]
    with pytest.raises(Interrupted):
        train(translation_recipe, out=tmp_path / "run", device="cpu", reporter=StopAt(10), **settings)
    runs.append(train(translation_recipe, out=tmp_path / "run", device="cpu", resume=True, **settings))
    one, other = (read_checkpoint(r.folder.last, only="model").tensors for r in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)
    lines = ["one red house.", "two."]
    together, alone = runs[0].translate(lines), [runs[0].translate([line])[0] for line in lines]
    assert [found[0].text for found in together] == [found[0].text for found in alone]
    with pytest.raises(UserError, match=r"context\.feed_forward sru cannot be exported"):
        runs[0].export(tmp_path / "exported")
