"""A smaller model keeps its vocabulary or loses it, as asked or as measured, in a folder that loads."""

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.adapt.test_tokenizer_json import SAMPLE
from tests.test_cli import Command, torchdefine  # noqa: F401
from torchdefine.adapt import ShrinkOptions, shrink_model
from torchdefine.adapt.sentences import sentence_parts, sentence_vectors
from torchdefine.adapt.vocabulary import Version, versions_of
from torchdefine.errors import UserError

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FEW = {"choosing": 30, "held_out": 60, "distill_steps": 0}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English, from one end of what the tokenizer was trained on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    with lzma.open(SAMPLE, "rt", encoding="utf-8") as file:
        path.write_text("".join(line for line in list(file)[:150] if len(line.split()) > 5), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert") / "model"
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    with lzma.open(SAMPLE, "rt", encoding="utf-8") as file:
        trainer = trainers.WordPieceTrainer(vocab_size=2_000, special_tokens=SPECIAL, show_progress=False)
        made.train_from_iterator(list(file)[:1_500], trainer)
    tokenizer = transformers.BertTokenizer(vocab=json.loads(made.to_str())["model"]["vocab"])
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer) + 8,  # filled up, as many are
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(tokenizer.get_vocab()))  # of a time before tokenizer.json
    return folder


def reports(folder: Path) -> Any:
    return json.loads((folder / "adapt.json").read_text())["vocabulary"]


def test_trimmed(bert_folder: Path, text: Path, tmp_path: Path) -> None:
    shrunk = shrink_model(bert_folder, text, tmp_path / "new", "30KB", options=ShrinkOptions(vocabulary="trim", **FEW))
    model = transformers.AutoModel.from_pretrained(tmp_path / "new")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    before = transformers.AutoModel.from_pretrained(bert_folder)
    old = transformers.AutoTokenizer.from_pretrained(bert_folder)
    kept = len(tokenizer)
    assert kept == model.config.vocab_size == model.get_input_embeddings().num_embeddings < 0.8 * len(old)
    assert not (tmp_path / "new" / "vocab.txt").exists()
    held_out = sentence_parts(text, choosing=30, held_out=60).held_out
    pair = sentence_vectors(before, old, held_out), sentence_vectors(model, tokenizer, held_out)
    assert shrunk.measures["cosine"].value == pytest.approx(float(torch.cosine_similarity(*pair).mean()), abs=1e-5)
    report = reports(tmp_path / "new")
    assert report["choice"] == "trim"
    assert report["tokens"] == [len(old), kept]
    assert report["tokenizer_bytes"][1] < report["tokenizer_bytes"][0]
    assert 0.8 < report["coverage"]["tokens_kept"] < 1
    assert report["coverage"]["unknown"] == 0
    assert shrunk.replacement.parameters_before == sum(parameter.numel() for parameter in before.parameters())


@pytest.mark.parametrize("budget", ["8KB", "100KB"])
def test_auto_takes_what_measures_better(budget: str, bert_folder: Path, text: Path, tmp_path: Path) -> None:
    """With many bytes, words that were never seen are worth them; with few, one vector may do for all of these."""
    shrunk = shrink_model(bert_folder, text, tmp_path / "new", budget, options=ShrinkOptions(vocabulary="auto", **FEW))
    report = reports(tmp_path / "new")
    assert report["tried"].keys() == {"keep", "trim"}
    assert report["choice"] == max(report["tried"], key=report["tried"].get)
    assert report["choice"] == "keep" or budget == "8KB"
    (fitted,) = json.loads((tmp_path / "new" / "adapt.json").read_text())["fits"].values()
    assert {one["method"] for one in fitted["candidates"]} == {"bits", "used"}
    rows = len(transformers.AutoTokenizer.from_pretrained(tmp_path / "new"))
    assert rows == shrunk.vocabulary.tokens[1]


def test_the_command(torchdefine: Command, bert_folder: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    few = ("--choosing", "20", "--held-out", "30", "--distill", "0", "--budget", "30KB", "--text", text)
    done = torchdefine("adapt", bert_folder, *few, "--out", tmp_path / "new", "--vocabulary", "trim")
    assert done.returncode == 0, done.stderr
    assert " tokens. Tokenizer files: 0." in done.stdout
    assert "of the old tokens are kept" in done.stdout
    assert "trimmed to" in done.stderr


def test_a_token_that_the_tokenizer_does_not_have_is_refused(bert_folder: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(bert_folder, tmp_path / "damaged")
    settings = json.loads((tmp_path / "damaged" / "config.json").read_text())
    wrong = settings | {"sep_token_id": settings["vocab_size"] - 1}
    (tmp_path / "damaged" / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(UserError, match="which its tokenizer does not have: keep all tokens"):
        shrink_model(
            tmp_path / "damaged", text, tmp_path / "no", "30KB", options=ShrinkOptions(vocabulary="auto", **FEW)
        )


def test_a_model_that_depends_on_the_numbers_of_tokens_is_refused(bert_folder: Path) -> None:
    class Odd(transformers.BertModel):
        def forward(self, input_ids: Any, **others: Any) -> Any:
            found = super().forward(input_ids, **others)
            found.last_hidden_state = found.last_hidden_state + input_ids[..., None] % 7
            return found

    tokenizer = transformers.AutoTokenizer.from_pretrained(bert_folder)
    whole = Version("keep", Odd.from_pretrained(bert_folder).eval(), tokenizer)
    with pytest.raises(UserError, match="depends on the numbers of tokens: keep its vocabulary"):
        versions_of(whole, ["It was the only game of the season ."], "trim")
