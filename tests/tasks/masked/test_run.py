"""From a text to a trained run and what can be done with it."""

import json
from pathlib import Path

import pytest
import torch

from tests.commands import printed
from torchdefine import UserError, load_run, train
from torchdefine.data import Corpus
from torchdefine.run.checkpoint_file import read_checkpoint
from torchdefine.tasks.masked import MaskedRun
from torchdefine.training import Interrupted
from torchdefine.training.progress import Reporter

pytest.importorskip("tokenizers")
CHANGES = {
    "data": {"bpe_size": 300},
    "embedding": {"map_dim": 8, "row_dropout": 0.1},
    "unit": {"kind": "define", "embedding_dim": 32, "expand_dim": 32, "depth": 2},
    "context": {"layers": 1, "heads": 2, "hidden_dim": 48, "dropout": 0.1, "most_places": 64},
    "masking": {"whole_words": True},
    "optim": {"lr": 0.01},
    "schedule": {"warmup": 5},
    "train": {"batch_size": 8, "length": 24, "steps": 60, "log_every": 5, "eval_every": 20, "checkpoint_every": 10},
}


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> MaskedRun:
    torch.set_num_threads(1)
    data = {"corpus": str(corpus), **CHANGES["data"]}
    out = tmp_path_factory.mktemp("masked") / "run"
    return train("masked/laptop", out=out, device="cpu", **{**CHANGES, "data": data})


class StopAt(Reporter):
    def trained(self, record: dict) -> None:
        if record["step"] == 35:
            raise KeyboardInterrupt


def test_it_learns_and_is_loaded_again(run: MaskedRun) -> None:
    curve = [record["perplexity"] for record in run.result["curve"]]
    assert curve[-1] < 0.7 * curve[0]
    assert run.result["test_perplexity"] < 100
    assert 0 < run.result["test_accuracy"] < 1
    loaded = load_run(run.folder.path, device="cpu")
    assert isinstance(loaded, MaskedRun)
    facts = loaded.measure("test").facts
    assert facts["perplexity"] == run.result["test_perplexity"]
    assert facts["accuracy"] == run.result["test_accuracy"]


def test_an_evaluation_hides_the_same_tokens_whatever_the_batch(run: MaskedRun) -> None:
    from torchdefine.run.run import text_of
    from torchdefine.tasks.masked.evaluate import evaluate
    from torchdefine.tasks.masked.run import protocol_of

    text, protocol = text_of(run, "test", None), protocol_of(run.recipe, run.tokenization)
    few, many = (evaluate(run.model, text, protocol._replace(batch_size=size))[0] for size in (3, 50))
    assert few.tokens == many.tokens
    assert few.loss == pytest.approx(many.loss, rel=1e-5)
    other, _ = evaluate(run.model, text, protocol._replace(seed=1))
    assert other.loss != pytest.approx(many.loss, rel=1e-5)


def test_a_stopped_run_goes_on_to_the_same_weights(run: MaskedRun, corpus: Path, tmp_path: Path) -> None:
    data = {"corpus": str(corpus), **CHANGES["data"]}
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        train("masked/laptop", out=tmp_path / "run", device="cpu", reporter=StopAt(), **{**CHANGES, "data": data})
    resumed = train(out=tmp_path / "run", device="cpu", resume=True)
    for file in ("last", "best"):
        one, two = (read_checkpoint(getattr(r.folder, file)).tensors for r in (run, resumed))
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert resumed.result["test_perplexity"] == run.result["test_perplexity"]


def test_it_fills_what_is_missing(run: MaskedRun) -> None:
    (filled,) = run.fill("w3 w24 <mask> w5", 4)
    assert len(filled) == 4
    probabilities = [probability for _, probability in filled]
    assert probabilities == sorted(probabilities, reverse=True)
    assert 0 < sum(probabilities) <= 1
    with pytest.raises(UserError, match="There is nothing to fill"):
        run.fill("w3 w24")
    _, rows = run.sample("w3 w24 w5", 10, 1).table or ((), ())
    assert [row[0] for row in rows] == ["w3", "w24", "w5"]


def test_the_commands_serve_it(run: MaskedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.folder.path
    assert "masked perplexity" in printed(capsys, "eval", path, "--device", "cpu")
    assert json.loads(printed(capsys, "params", path, "--json"))["counts"] == run.result["parameters"]
    printed(capsys, "compress", path, "--budget", "3KB")
    packed = load_run(path, device="cpu", compressed=True).measure().facts["perplexity"]
    assert packed == pytest.approx(run.result["test_perplexity"], rel=0.3)
    printed(capsys, "cache", path)
    assert load_run(path, device="cpu", cached=True).measure().facts["perplexity"] == pytest.approx(
        run.result["test_perplexity"], rel=1e-5
    )
    with_unit = ("export", path, "--format", "transformers-with-unit", "--out", tmp_path / "unit")
    assert "leave --cached and --compressed out" in printed(capsys, *with_unit, "--cached", fails=2)
    printed(capsys, *with_unit)
    assert "import torchdefine.adapt.huggingface" in (tmp_path / "unit" / "README.md").read_text()
    encoded = tmp_path / "encoded"
    printed(
        capsys, "encode", "masked/laptop", "--data", run.recipe.data.corpus, "--data.bpe_size", 300, "--out", encoded
    )
    assert Corpus.open(encoded).tokenization.sha256 == run.tokenization.sha256
    assert "has no `generate`" in printed(capsys, "generate", path, fails=2)
    assert "'onyx' is unknown" in printed(capsys, "export", path, "--format", "onyx", "--out", tmp_path / "x", fails=2)


def test_it_becomes_a_folder_of_transformers(run: MaskedRun, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    path, out = run.folder.path, tmp_path / "stock"
    printed(capsys, "export", path, "--format", "transformers", "--out", out, "--license", "cc-by-sa-4.0")
    assert 'license: "cc-by-sa-4.0"' in (out / "README.md").read_text()
    fill = transformers.pipeline("fill-mask", model=str(out))
    theirs = [one["score"] for one in fill("w3 w24<mask>", top_k=3)]
    assert theirs == pytest.approx([probability for _, probability in run.fill("w3 w24<mask>", 3)[0]], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_its_programs_give_the_same(format: str, run: MaskedRun, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
    facts = run.export(tmp_path / "out", format)
    assert set(facts["programs"]) == {"encoder", "predictions"}
    assert max(program["largest_difference"] for program in facts["programs"].values()) < 1e-5


@pytest.mark.slow
def test_sentence_transformers_reads_it(run: MaskedRun, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    run.export(tmp_path / "out", "transformers")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    (vector,) = model.encode(["w3 w24 w5"])
    tokens = run.tokenization
    ids = [tokens.bos_id, *tokens.encode_sentences(["w3 w24 w5"])[0], tokens.eos_id]
    with torch.no_grad():
        ours = run.model.hidden(torch.tensor([ids]))[0].mean(0)
    torch.testing.assert_close(torch.from_numpy(vector), ours, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_trains_it(precision: str, corpus: Path, tmp_path: Path) -> None:
    changes = {**CHANGES, "data": {"corpus": str(corpus), **CHANGES["data"]}}
    changes["train"] = {**CHANGES["train"], "precision": precision}
    run = train("masked/laptop", out=tmp_path / "run", device="cuda", **changes)
    assert run.result["test_perplexity"] < 100
