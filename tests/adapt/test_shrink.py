"""A model folder and a text in, a smaller model folder out; from Python and by the command."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import tokenizers
import transformers
from safetensors import SafetensorError

from tests.adapt.tiny_models import FAMILIES
from tests.test_cli import Command, assert_refused, torchdefine  # noqa: F401
from torchdefine.adapt import FitOptions, Fitted, ShrinkOptions, fit, shrink, shrink_model
from torchdefine.adapt.model_folder import open_model
from torchdefine.adapt.sentences import sentence_parts, sentence_vectors
from torchdefine.errors import MachineError, UserError
from torchdefine.files import Progress
from torchdefine.tables import CodeLearning, UnitFitting

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

OPTIONS = ShrinkOptions(choosing=20, held_out=30, distill_steps=3)
TRAINED = {"define", "mlp", "codes"}
"""Kinds of tables that take minutes."""


def tried(folder: Path) -> set[str]:
    """The kinds of tables that a report tells of."""
    fits = json.loads((folder / "adapt.json").read_text())["fits"]
    return {one["method"] for fitted in fits.values() for one in fitted["candidates"]}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of the words w3 … w96, rare ones rarer."""
    generator = torch.Generator().manual_seed(0)
    chances = 1.0 / torch.arange(1, 95)
    lines = [
        " ".join(f"w{int(word) + 3}" for word in torch.multinomial(chances, 8, generator=generator)) for _ in range(200)
    ]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    words = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2} | {f"w{number}": number for number in range(3, 97)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", mask_token="[UNK]"
    )
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    (folder / "NOTICE.txt").write_text("kept")
    (folder / "README.md").write_text("the model's own")
    return folder


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    return save_with_tokenizer(transformers.BertModel(config), tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture
def fails_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known beforehand must be said before anything is fitted."""

    def work(*_: Any, **__: Any) -> None:
        pytest.fail("the work has begun")

    monkeypatch.setattr("torchdefine.adapt.shrink.fit", work)


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_a_folder_in_a_folder_out(name: str, text: Path, tmp_path: Path) -> None:
    old = save_with_tokenizer(FAMILIES[name].make(True), tmp_path / "old")
    shrunk = shrink_model(old, text, tmp_path / "new", "5KB", options=OPTIONS)
    assert shrunk.replacement.tables[0].bytes_after <= 5_000 + 4
    assert shrunk.file_bytes[1] < shrunk.file_bytes[0]
    model = FAMILIES[name].auto_class.from_pretrained(tmp_path / "new")
    before = FAMILIES[name].auto_class.from_pretrained(old)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    held_out = sentence_parts(text, choosing=20, held_out=30).held_out
    measures = shrunk.measures
    model.requires_grad_(False)
    if name == "llama":  # sentence by sentence, without padding
        losses, alike = [], []
        for sentence in held_out:
            given = tokenizer(sentence, return_tensors="pt")["input_ids"]
            old_logits, logits = (one(given).logits[0, :-1].double().log_softmax(-1) for one in (before, model))
            losses.append((old_logits.exp() * (old_logits - logits)).sum(-1))
            alike.append(old_logits.argmax(-1) == logits.argmax(-1))
        assert measures["KL"].value == pytest.approx(float(torch.cat(losses).mean()), rel=0.02)  # it is about 1e-5
        assert measures["top-1 agreement"].value == pytest.approx(float(torch.cat(alike).double().mean()))
        assert 0 < measures["KL"].low < measures["KL"].high < 0.1
    if name == "t5":
        pair = (sentence_vectors(one, tokenizer, held_out) for one in (before, model))
        assert measures["cosine"].value == pytest.approx(float(torch.cosine_similarity(*pair).mean()), abs=1e-6)
        assert measures["cosine"].value > 0.9
    else:
        assert measures["perplexity"].value == pytest.approx(measures["perplexity"].before, rel=0.05)
    report = json.loads((tmp_path / "new" / "adapt.json").read_text())
    assert report["held_out"].keys() == {"sentences", *measures}
    assert report["held_out"]["sentences"] == 30
    assert report["version"] == 2
    assert (tmp_path / "new" / "NOTICE.txt").read_text() == "kept"
    assert (tmp_path / "new" / "README.before.md").read_text() == "the model's own"
    card = (tmp_path / "new" / "README.md").read_text()
    assert "import torchdefine.adapt.huggingface" in card
    assert f"{shrunk.replacement.tables[0].bytes_after:,}" in card
    assert "`README.before.md` is the card" in card
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "new").iterdir() if path.is_file()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["NOTICE.txt"]
    assert not list(tmp_path.glob(".*"))


@pytest.fixture
def trained_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training for minutes, in a moment."""

    def fit_soon(*arguments: Any, options: FitOptions, **others: Any) -> Fitted:
        units, codes = {"training": UnitFitting(steps=5)}, {"training": CodeLearning(steps=5, rounds=1)}
        fast = replace(options, settings={"define": units, "mlp": units, "codes": codes})
        return fit(*arguments, options=fast, **others)

    monkeypatch.setattr(shrink, "fit", fit_soon)


def test_what_is_trained_is_tried_too_if_asked(
    bert_folder: Path, text: Path, tmp_path: Path, trained_soon: None
) -> None:
    options = replace(OPTIONS, thorough=True, distill_steps=0)
    shrink_model(bert_folder, text, tmp_path / "new", "5KB", options=options)
    assert tried(tmp_path / "new") >= {"bits", *TRAINED}
    assert (tmp_path / "new" / "front.svg").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", [0.3, 0.99])  # among the candidates, and during distillation
def test_a_thorough_search_goes_on_after_a_kill(
    at: float, bert_folder: Path, text: Path, tmp_path: Path, trained_soon: None
) -> None:
    options = replace(OPTIONS, thorough=True, distill_steps=45)
    reached: list[float] = []

    @contextlib.contextmanager
    def until(limit: float, what: str) -> Iterator[Progress]:
        def report(done: int, total: int) -> None:
            reached.append(done / total)
            if what.startswith("fitting") and done / total >= limit:
                raise Killed

        yield report

    shrink_model(bert_folder, text, tmp_path / "whole", "5KB", options=options, stage=lambda what: until(2, what))
    assert max(reached) == 1
    with pytest.raises(Killed):
        shrink_model(bert_folder, text, tmp_path / "new", "5KB", options=options, stage=lambda what: until(at, what))
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="holds unfinished work of other settings, text or model: remove it"):
        shrink_model(bert_folder, text, tmp_path / "new", "4KB", options=options)
    shrink_model(bert_folder, text, tmp_path / "new", "5KB", options=options)
    whole, new = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "new"))
    assert whole == new
    assert not (tmp_path / "new.work").exists()


def test_the_command(torchdefine: Command, bert_folder: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "smaller"
    few = ("--choosing", "20", "--held-out", "30", "--distill", "2")
    done = torchdefine("adapt", bert_folder, "--budget", "5KB", "--text", text, "--out", out, *few)
    assert done.returncode == 0, done.stderr
    assert "No other method was tried" in done.stdout
    assert "  cosine: " in done.stdout
    assert tried(out)
    assert not tried(out) & TRAINED
    assert "measuring the sensitivity of embeddings.word_embeddings" in done.stderr
    assert transformers.AutoModel.from_pretrained(out).get_input_embeddings().num_embeddings == 97

    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: mine\n")
    arguments = ["--budget", "5KB", "--text", text, "--out", tmp_path / "new", *few]
    changed = {
        "exists already and is not empty": [bert_folder, *arguments[:5], out, *few],
        "has no config.json": [tmp_path, *arguments],
        f"There is no folder {tmp_path / 'modell'}, and nothing is downloaded: give": [tmp_path / "modell", *arguments],
        f"is a run of torchdefine and no model of transformers: make it smaller by `torchdefine compress {run}`": [
            *(run, *arguments)
        ],
        "were replaced already": [out, *arguments],
        "There is no text file": [bert_folder, *arguments, "--text", tmp_path / "missing.txt"],
        "The budget 'much' is not a size": [bert_folder, *arguments, "--budget", "much"],
        "The budget of 20 KB has room for embeddings.word_embeddings as in the model, 12.4 KB, so there": [
            *(bert_folder, *arguments, "--budget", "20KB")
        ],
        "as in the model, 0.0031 M parameters (12.4 KB in float32), so": [
            *(bert_folder, *arguments, "--budget", "3104 parameters")
        ],
        "are too few for one column: allow more": [bert_folder, *arguments, "--budget", "10B"],
        "distill_steps is -1, but must be at least 0": [bert_folder, *arguments, "--distill", "-1"],
        "held_out is 1, but must be at least 2": [bert_folder, *arguments, "--held-out", "1"],
        "The device 'tpu' is unknown": [bert_folder, *arguments, "--device", "tpu"],
    }
    for words, given in changed.items():
        assert_refused(torchdefine("adapt", *given), words)
    assert not (tmp_path / "new").exists()


def test_a_language_model_is_judged_by_its_predictions(
    torchdefine: Command,  # noqa: F811
    text: Path,
    tmp_path: Path,
) -> None:
    old = save_with_tokenizer(FAMILIES["llama"].make(True), tmp_path / "old")
    few = ("--choosing", "20", "--held-out", "30", "--distill", "0")
    done = torchdefine("adapt", old, "--budget", "5KB", "--text", text, "--out", tmp_path / "new", *few)
    assert done.returncode == 0, done.stderr
    assert "  KL: " in done.stdout
    assert "perplexity" in done.stdout
    assert "cosine" not in done.stdout


def test_own_pairs_and_labels_are_measured_too(bert_folder: Path, text: Path, tmp_path: Path) -> None:
    lines = text.read_text().splitlines()
    files = {name: tmp_path / f"{name}.tsv" for name in ("pairs", "scores", "labels")}
    files["pairs"].write_text("".join(f"{line}\t{line}\n" for line in lines[:50]))
    scored = zip(lines[:50], lines[50:100], range(50), strict=True)
    files["scores"].write_text("".join(f"{one}\t{other}\t{score % 7}\n" for one, other, score in scored))
    files["labels"].write_text("".join(f"{line}\t{'w3 ' in line}\n" for line in lines[:100]))
    both = {"labels": files["labels"], "options": OPTIONS}
    shrunk = shrink_model(bert_folder, text, tmp_path / "new", "5KB", pairs=files["pairs"], **both)
    found = shrunk.measures["pairs, mean reciprocal rank"]
    assert found.before == 1  # each text is its own answer
    assert 0.9 < found.low <= found.value <= 1
    assert 0.5 < shrunk.measures["labels, accuracy"].value <= 1
    scored_one = shrink_model(bert_folder, text, tmp_path / "scored", "5KB", pairs=files["scores"], options=OPTIONS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert_folder)
    before = transformers.AutoModel.from_pretrained(bert_folder)
    one, other = (sentence_vectors(before, tokenizer, some) for some in (lines[:50], lines[50:100]))
    cosines, wanted = torch.cosine_similarity(one, other), [score % 7 for score in range(50)]
    stats = pytest.importorskip("scipy.stats")
    known = scored_one.measures["pairs, rank correlation"].before
    assert known == pytest.approx(stats.spearmanr(cosines, wanted).statistic, abs=1e-4)


def test_wrong_examples_are_refused_before_the_work(
    bert_folder: Path, text: Path, tmp_path: Path, fails_at_work: None
) -> None:
    few, odd = tmp_path / "few.tsv", tmp_path / "odd.tsv"
    few.write_text("a\tb\n")
    odd.write_text("a\tb\n" * 50 + "a\n")
    refused = {"has 1 examples, but 40 are needed": few, "needs two texts, or two texts and a number": odd}
    for words, path in {**refused, "There is no file": tmp_path / "none"}.items():
        with pytest.raises(UserError, match=words):
            shrink_model(bert_folder, text, tmp_path / "new", "5KB", pairs=path, options=OPTIONS)
    llama = save_with_tokenizer(FAMILIES["llama"].make(True), tmp_path / "llama")
    odd.write_text("a\tb\n" * 50)
    with pytest.raises(UserError, match="Pairs need a model of sentences"):
        shrink_model(llama, text, tmp_path / "new", "5KB", pairs=odd, options=OPTIONS)


def test_the_rest_in_8_bits(bert_folder: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    kept, rounded = (
        shrink_model(bert_folder, text, tmp_path / rest, "5KB", options=replace(OPTIONS, rest=rest))
        for rest in ("keep", "int8")
    )
    model = transformers.AutoModel.from_pretrained(tmp_path / "int8")
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    saved = kept.file_bytes[1] - rounded.file_bytes[1]
    assert saved > 1.8 * linear  # of 3 bytes that each weight may lose, less scales
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "int8")
    before = transformers.AutoModel.from_pretrained(bert_folder)
    held_out = sentence_parts(text, choosing=20, held_out=30).held_out
    pair = (sentence_vectors(one, tokenizer, held_out) for one in (before, model))
    assert rounded.measures["cosine"].value == pytest.approx(float(torch.cosine_similarity(*pair).mean()), abs=1e-5)
    assert rounded.measures["cosine"].value > kept.measures["cosine"].value - 1e-3


def test_a_model_without_linear_layers_is_refused_in_8_bits(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    old = save_with_tokenizer(FAMILIES["gpt2"].make(True), tmp_path / "old")
    with pytest.raises(UserError, match=r"torchao rounds linear layers, and a GPT2LMHeadModel has none"):
        shrink_model(old, text, tmp_path / "new", "5KB", options=replace(OPTIONS, rest="int8"))
    assert not (tmp_path / "new").exists()


def test_a_classifier_is_judged_by_its_classes(text: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=97, num_labels=3, **sizes))
    old = save_with_tokenizer(model, tmp_path / "old")
    shrunk = shrink_model(old, text, tmp_path / "new", "5KB", options=OPTIONS)
    assert shrunk.measures.keys() == {"agreement", "KL"}
    assert 0.8 < shrunk.measures["agreement"].value <= 1


@pytest.mark.parametrize("within", ["model/smaller", "model/pooling/smaller"])
def test_a_place_within_the_model_is_refused_before_the_work(
    within: str, bert_folder: Path, text: Path, tmp_path: Path, fails_at_work: None
) -> None:
    """The copy would be copied into itself."""
    shutil.copytree(bert_folder, tmp_path / "model")
    (tmp_path / "model" / "pooling").mkdir()
    with pytest.raises(UserError, match=r"lies within .*: choose a folder outside"):
        shrink_model(tmp_path / "model", text, tmp_path / within, "5KB", options=OPTIONS)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "pooling/config.json"])
def test_a_link_to_nothing_is_named_before_the_work(
    name: str, bert_folder: Path, text: Path, tmp_path: Path, fails_at_work: None
) -> None:
    shutil.copytree(bert_folder, tmp_path / "model")
    (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "model" / name).unlink(missing_ok=True)
    (tmp_path / "model" / name).symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=f"model/{name} is to be copied .* a link to nothing .*: mend or remove it"):
        shrink_model(tmp_path / "model", text, tmp_path / "new", "5KB", options=OPTIONS)


def test_a_disk_that_is_full_in_the_end_is_told_in_a_sentence(
    bert_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transformers.BertModel, "save_pretrained", no_space)
    with pytest.raises(MachineError, match=r"The disk is full, so .*new could not be written"):
        shrink_model(bert_folder, text, tmp_path / "new", "5KB", options=OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", "abc"), ("hidden_size", None), ("num_attention_heads", 0), ("hidden_act", "no")]
)
def test_a_wrong_setting_of_the_model_is_told_in_a_sentence(
    name: str, value: Any, bert_folder: Path, text: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(bert_folder, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {name: value}))
    with pytest.raises(UserError, match=r"The model in .*model cannot be read \(.*\): save it again"):
        shrink_model(model, text, tmp_path / "new", "5KB", options=OPTIONS)


def test_a_damaged_tokenizer_is_told_in_a_sentence(bert_folder: Path, text: Path, tmp_path: Path) -> None:
    model = shutil.copytree(bert_folder, tmp_path / "model")
    settings = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(settings | {"pre_tokenizer": {"type": "unknown"}}))
    with pytest.raises(UserError, match=r"The tokenizer in .*model cannot be read \(.*\): save it beside the model"):
        shrink_model(model, text, tmp_path / "new", "5KB", options=OPTIONS)


def test_damaged_models_and_tokenizers_are_refused(bert_folder: Path, text: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(bert_folder, broken)
    (broken / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="cannot be read"):
        shrink_model(broken, text, tmp_path / "new", "5KB", options=OPTIONS)
    shutil.copyfile(bert_folder / "model.safetensors", broken / "model.safetensors")
    for path in broken.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match="The tokenizer in"):
        shrink_model(broken, text, tmp_path / "new", "5KB", options=OPTIONS)
    assert not (tmp_path / "new").exists()


CODE = """
from pathlib import Path
Path(__file__).with_name("was-run").touch()
Path({mark!r}).touch()
from transformers import BertConfig, BertModel
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertModel):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_in_a_models_folder_is_not_run(
    bert_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nor asked about: an answer on standard input changes nothing."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model = shutil.copytree(bert_folder, tmp_path / "model")
    (model / "own.py").write_text(CODE.format(mark=str(tmp_path / "was-run")))
    settings = json.loads((model / where).read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoTokenizer": ["own.OwnModel", None]}
    own = settings | {"auto_map": names, "model_type": "own", "tokenizer_class": "OwnTokenizer"}
    (model / where).write_text(json.dumps(own))
    for device in ("cpu", "cpu"):
        with contextlib.suppress(UserError):
            open_model(model, device)
    assert not (tmp_path / "was-run").exists()
    if where == "config.json":
        with pytest.raises(UserError, match=r"has Python code, which torchdefine does not run: .*--trust-code"):
            shrink_model(model, text, tmp_path / "new", "5KB", options=OPTIONS)
        with contextlib.suppress(UserError):
            open_model(model, trust_code=True)
        assert (tmp_path / "was-run").exists()


@pytest.mark.parametrize("odd", ["x", "BertModel", ["pipeline"], ["AutoTokenizer"], [5], [], {"a": 1}, 7, ["__all__"]])
def test_odd_architectures_are_read_or_refused(bert_folder: Path, tmp_path: Path, odd: Any) -> None:
    model = shutil.copytree(bert_folder, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"architectures": odd}))
    with contextlib.suppress(UserError):
        assert open_model(model)[0] is not None
