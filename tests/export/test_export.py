"""Exports as folders: what they hold, what the card says, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.commands import command

from torchdefine import DeFINE, load_run, train
from torchdefine.data import NAMED_TEXTS, licence_of
from torchdefine.errors import MachineError, UserError
from torchdefine.export import check_export, folder, load_export
from torchdefine.export.card import is_rounded
from torchdefine.export.folder import file_facts
from torchdefine.export.formats import FORMATS, OLDEST_TORCH
from torchdefine.files import write_sealed
from torchdefine.recipe import load_recipe
from torchdefine.run.starting import without_paths
from torchdefine.tables import compress_embedding

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH, reason="needs a newer torch, as exporting does"
)


@pytest.fixture(scope="module")
def run_folder(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exporting") / "run"
    train(recipe_file, out=out, train={"steps": 20}, context={"input_dropout": 0.1})
    return out


@pytest.fixture(scope="module")
def exported(run_folder: Path) -> Path:
    """A torch-export of the run, made by the command line."""
    out = run_folder.parent / "exported"
    assert command("export", run_folder, "--format", "torch-export", "--out", out, "--license", "CC0 1.0") == 0
    return out


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "copied")
    return tmp_path / "copied"


def code_of_the_card(folder: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)


def run_the_card(folder: Path) -> str:
    """Run the card's Python in the folder, where torchdefine cannot be imported."""
    code = "\n".join(["import sys", "sys.modules['torchdefine'] = None", *code_of_the_card(folder)])
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_holds_all_that_a_stranger_needs(exported: Path, run_folder: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "embedding.pt2", "step.pt2", "model.safetensors", "vocab.txt", "config.yaml", "export.json", "README.md",
    }  # fmt: skip
    facts = json.loads((exported / "export.json").read_text())
    assert facts["version"] == 1
    assert facts["vocabulary"]["sha256"] == load_run(run_folder).tokenization.sha256
    step = facts["programs"]["step"]
    assert [port["name"] for port in step["inputs"]] == ["ids", "hidden_0", "cell_0", "hidden_1", "cell_1"]
    assert step["outputs"][0] == {"name": "log_probs", "shape": ["batch", 62], "dtype": "float32"}
    assert 0 < step["largest_difference"] < 1e-5
    weights = load_file(exported / "model.safetensors")
    for name, tensor in load_run(run_folder).model.state_dict().items():
        assert torch.equal(weights[name], tensor)


def test_the_card_says_what_the_model_is_and_where_it_comes_from(exported: Path, run_folder: Path) -> None:
    card = (exported / "README.md").read_text()
    run = load_run(run_folder)
    result = run.result
    for said in (
        "A tiny model for tests, changed by context.input_dropout 0.1\n",
        "an LSTM of 2 layers",
        "a table in bands by frequency, 62 × 16, followed by a DeFINE unit",
        f"| total | {result['parameters']['total']:,} |",
        result["data"]["splits"]["train"]["text_sha256"],
        f"{result['test_perplexity']:.2f}",
        "Its licence is not known here",
        "CC0 1.0",
    ):
        assert said in card, said
    for name in ("README.md", "config.yaml", "export.json"):
        assert "/" + run_folder.parts[1] + "/" not in (exported / name).read_text(), "a path of the trainer's machine"
    assert yaml.safe_load((exported / "config.yaml").read_text())["data"]["corpus"] == Path(run.recipe.data.corpus).name


def test_the_code_of_the_card_runs(exported: Path) -> None:
    assert len(code_of_the_card(exported)) == 3  # how to open one, the embedding, the step
    assert all(len(code.splitlines()) <= 12 for code in code_of_the_card(exported))
    printed = run_the_card(exported)
    assert "torch.Size([2, 3, 16])" in printed
    words = printed.splitlines()[-1].split()
    assert len(words) == 10
    assert all(re.fullmatch(r"w\d+|<eos>|<unk>", word) for word in words)


def test_a_loaded_export_continues_as_the_run_does(exported: Path, run_folder: Path) -> None:
    step = load_export(exported).programs["step"]
    run = load_run(run_folder, device="cpu")
    ids = torch.randint(62, (2, 10))
    with torch.no_grad():
        expected, _ = run.model.log_prob(ids, run.model.initial_state(2))
    carried = {port.name: torch.zeros(port.sized({"batch": 2})) for port in step.inputs[1:]}
    for place in range(10):
        found = step(ids=ids[:, place : place + 1], **carried)
        torch.testing.assert_close(found["log_probs"], expected[:, place], atol=1e-5, rtol=0)
        carried = {name: found[f"{name}_after"] for name in carried}
    with pytest.raises(UserError, match="takes ids, hidden_0"):
        step(ids=ids[:, :1])


def test_onnx_by_the_command_line(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_run(run_folder).cache("bf16")
    out = tmp_path / "a" / "exported"
    assert command("export", run_folder, "--format", "onnx", "--cached", "--out", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"onnx", "onnxruntime", "onnxscript", "torch"} <= facts["versions"].keys()
    assert max(program["largest_difference"] for program in facts["programs"].values()) < 1e-5
    assert "(2, 3, 16)" in run_the_card(out)
    card = (out / "README.md").read_text()
    assert "looked up in a cache" in card
    assert "Cached vectors are in bfloat16" in card
    assert "They were measured with float32 vectors. This export has rounded vectors." in card
    assert b"torchdefine/" not in (out / "step.onnx").read_bytes()
    assert command("export", "--check", out) == 0
    printed = capsys.readouterr().out
    assert "is complete, and its programs run" in printed
    assert "step.onnx" in printed


def test_check_refuses_what_is_not_as_it_was(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_export(copied).facts["name"]
    facts = json.loads((copied / "export.json").read_text())
    other = (copied / "vocab.txt").read_text().replace("w7\t", "w777\t")
    longer_weights = (copied / "model.safetensors").read_bytes() + b" "
    for name, content, message in (
        ("step.pt2", (copied / "step.pt2").read_bytes()[:-100], "step.pt2 was cut short"),
        ("model.safetensors", (copied / "model.safetensors").read_bytes()[:200], "model.safetensors was cut short"),
        ("vocab.txt", other.encode(), "vocab.txt is not the file that was exported"),
        ("vocab.txt", other.encode()[:50], "vocab.txt was cut short"),
        ("config.yaml", (copied / "config.yaml").read_bytes() + b"# changed", "is not the file that was exported"),
        ("embedding.pt2", None, "embedding.pt2 is missing"),
        ("README.md", None, "README.md is missing"),
        ("export.json", None, "is not an export"),
        ("export.json", b"{", "is not valid JSON"),
        ("export.json", b'{"format": "cooking"}', "does not belong to an export"),
        ("export.json", json.dumps({**facts, "version": 2}).encode(), "format version 2; this torchdefine reads 1"),
        (
            "export.json",
            b'{"format": "torchdefine export", "version": 1}',
            "is damaged, or was changed after it was written",
        ),
        ("model.safetensors", longer_weights, "is not the file that was exported"),
    ):
        whole = (copied / name).read_bytes()
        (copied / name).unlink()
        if content is not None:
            (copied / name).write_bytes(content)
        assert command("export", "--check", copied) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("torchdefine: ")
        assert "UserError" not in error
        assert error.count("\n") == 1
        (copied / name).write_bytes(whole)
    assert command("export", "--check", copied) == 0


def test_misuse_is_refused_before_anything_is_written(
    run_folder: Path,
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = tmp_path / "new"
    for arguments, message in (
        (["export", run_folder, "--format", "onnx"], "An export needs a run and two options"),
        (["export", "--format", "onnx", "--out", new], "An export needs a run and two options"),
        (["export", run_folder, "--format", "tflite", "--out", new], "The format 'tflite' is unknown: use one of"),
        (["export", run_folder, "--format", "onnx", "--out", exported], "exists already and is not empty"),
        (["export", tmp_path, "--format", "onnx", "--out", new], "holds no run"),
        (["export", run_folder, "--check", exported], "--check takes the folder of an export and nothing else"),
        (["export", "--check", tmp_path], "is not an export"),
    ):
        assert command(*arguments) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr("torchdefine.export.formats.find_spec", lambda name: None)
    assert command("export", run_folder, "--format", "onnx", "--out", new) == 2
    assert "pip install 'torchdefine[export]'" in capsys.readouterr().err
    with pytest.raises(UserError, match="format 'onx' is unknown: did you mean 'onnx'"):
        load_run(run_folder).export(new, "onx")
    assert os.listdir(tmp_path) == []


def test_a_program_too_far_from_the_model_leaves_nothing(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "TOLERANCE", 1e-9)
    with pytest.raises(MachineError, match="The exported step differs from the model by"):
        load_run(run_folder).export(tmp_path / "new", "torch-export")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_traced_is_one_sentence_and_leaves_nothing(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(program: object) -> None:
        raise RuntimeError("a size\n  depends on a value")

    monkeypatch.setattr(folder, "trace", fail)
    assert command("export", run_folder, "--format", "torch-export", "--out", tmp_path / "new") == 1
    error = capsys.readouterr().err
    assert error.startswith("torchdefine: The embedding could not be exported (a size depends on a value)")
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_every_named_corpus_has_a_licence() -> None:
    assert all(licence_of(name) for name in NAMED_TEXTS)
    assert licence_of("/home/anyone/my_corpus") is None


def test_an_unfinished_run_and_other_weights_say_so(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    result = tmp_path / "run" / "result.json"
    facts = json.loads(result.read_text())
    facts["evaluation"]["test"]["perplexity"] = None
    write_sealed(result, facts)
    run = load_run(tmp_path / "run", checkpoint="last")
    run.export(tmp_path / "last")
    card = (tmp_path / "last" / "README.md").read_text()
    assert "These are the numbers of the run's best weights" in card
    assert "| test | perplexity | not finite |" in card
    (tmp_path / "run" / "result.json").unlink()
    run.recipe = replace(run.recipe, data=replace(run.recipe.data, corpus="wikitext-2-shuffled"))
    run.export(tmp_path / "unfinished")
    card = (tmp_path / "unfinished" / "README.md").read_text()
    assert "it was exported before it had finished" in card
    assert str(licence_of("wikitext-2-shuffled")) in card


def test_vectors_that_the_numbers_were_not_measured_with_are_rounded() -> None:
    embedding = DeFINE(50, 24, map_dim=16, expand_dim=64).eval()
    exact = embedding.table()
    packed = compress_embedding(embedding, "int8").table
    for looked_up, rounded in ((None, False), (exact, False), (exact.bfloat16(), True), (packed, True)):
        embedding.look_up(looked_up)
        assert is_rounded(embedding) is rounded


def test_no_path_of_the_trainers_machine_leaves_it() -> None:
    places = {
        "data": {"corpus": "/home/me/text", "tokenizer": "/home/me/bpe.json"},
        "train": {"start_from": "/home/me/x"},
    }
    settings = yaml.safe_load(without_paths(load_recipe("demo/standard", places)).to_yaml())
    found = settings["data"]["corpus"], settings["data"]["tokenizer"], settings["train"]["start_from"]
    assert found == ("text", "bpe.json", "x")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_the_card_of_a_transformer_xl_runs(recipe_file: Path, tmp_path: Path, format: str) -> None:
    context = {"kind": "transformer-xl", "layers": 2, "heads": 2, "head_dim": 8, "inner_dim": 32, "memory": 6}
    embedding = {"kind": "standard", "map_dim": 16}
    settings = {"context": context, "embedding": embedding, "unit": {"kind": "none"}, "output": {"kind": "full"}}
    run = train(recipe_file, out=tmp_path / "run", train={"steps": 5}, **settings)
    run.export(tmp_path / "exported", format)
    assert len(run_the_card(tmp_path / "exported").splitlines()[-1].split()) == 10


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("joint", [True, False])
def test_the_card_of_a_translator_translates(
    translation_recipe: Path, tmp_path: Path, format: str, joint: bool
) -> None:
    run = train(translation_recipe, out=tmp_path / "run", train={"steps": 20}, data={"joint": joint})
    run.export(tmp_path / "exported", format)
    assert run_the_card(tmp_path / "exported").splitlines()[-1].startswith("[")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "BLEU" in card
    loaded = check_export(tmp_path / "exported")
    ids = torch.tensor([[5, 9, run.tokenization.source.eos_id]])
    with torch.no_grad():
        expected, _ = run.model.cpu().eval().encode(ids)
    torch.testing.assert_close(loaded.programs["encoder"](ids=ids)["encoded"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "edit",
    [
        {"files": None},
        {"files": {}},
        {"programs": {}},
        {"programs": []},
        {"vocabulary": "x"},
        {"program_format": []},
        {"programs": {"step": {"file": "/etc/hostname", "inputs": [], "outputs": []}}},
        {"programs": {"step": {"file": "step.pt2", "inputs": [{"name": "ids", "shape": [-3], "dtype": "int64"}]}}},
    ],
    ids=str,
)
def test_check_refuses_a_record_that_was_edited(copied: Path, edit: dict, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads((copied / "export.json").read_text())
    write_sealed(copied / "export.json", {**facts, **edit})
    assert command("export", "--check", copied) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_files_outside_the_folder_are_not_part_of_an_export(copied: Path) -> None:
    (outside := copied.parent / "letter.txt").write_text("somebody's")
    facts = json.loads((copied / "export.json").read_text())
    facts["files"]["../letter.txt"] = file_facts(copied.parent)[outside.name]
    write_sealed(copied / "export.json", facts)
    with pytest.raises(UserError, match="files outside the folder"):
        load_export(copied)


def test_check_refuses_a_program_that_gives_something_else_than_was_promised(copied: Path) -> None:
    facts = json.loads((copied / "export.json").read_text())
    facts["programs"]["step"]["outputs"][0]["shape"] = ["batch", 61]
    write_sealed(copied / "export.json", facts)
    with pytest.raises(UserError, match=r"The program step in .* gives log_probs of \(1, 62\) .* instead of \(1, 61\)"):
        check_export(copied)


def test_places_that_cannot_be_made_anew_are_refused(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    for out in (".", tmp_path / "link"):
        assert command("export", run_folder, "--format", "torch-export", "--out", out) == 2
        assert "cannot be the name of a new folder" in capsys.readouterr().err


def test_a_torch_too_old_for_programs_is_refused(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    for format in FORMATS:
        assert command("export", run_folder, "--format", format, "--out", tmp_path / "x") == 2
        assert "Programs need torch 2.11 or newer, but this is 2.9.1+cpu" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
