"""A SentenceTransformer with a replaced table: trained, saved, loaded; and what is said without the import."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")
import tokenizers
import transformers
from sentence_transformers import SentenceTransformer, models

from tests.behaviour.models import CASES, V
from torchdefine import DeFINEBag, replace_embeddings, restore
from torchdefine.adapt.huggingface import with_define
from torchdefine.adapt.stand_in import StandIn

TEXTS = ["w1 w2 w3", "w9", "w4 w2 unknown"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:The replacement of"),  # the tables are tiny
    pytest.mark.filterwarnings("ignore:Importing from"),  # the new place is not in all versions
]


@pytest.fixture
def sentence_model(tmp_path: Path) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(V - 5))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {
        name: f"[{name[:-6].upper()}]" for name in ("unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
    }
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(tmp_path / "start")
    CASES["bert-base"].make().save_pretrained(tmp_path / "start")
    return SentenceTransformer(modules=[models.Transformer(str(tmp_path / "start")), models.Pooling(32)], device="cpu")


def test_replaced_trained_saved_and_loaded(sentence_model: Any, tmp_path: Path) -> None:
    assert with_define(sentence_model, map_dim=16, expand_dim=32, depth=2) is sentence_model
    assert any(isinstance(module, StandIn) for module in sentence_model.modules())
    before = sentence_model.encode(TEXTS)
    optimizer = torch.optim.Adam(sentence_model.parameters(), lr=1e-3)
    vectors = sentence_model.train()(sentence_model.preprocess(TEXTS))["sentence_embedding"]
    vectors.square().mean().backward()
    optimizer.step()
    after = sentence_model.eval().encode(TEXTS)
    assert (before != after).any()
    sentence_model.save_pretrained(str(tmp_path / "mine"))
    assert (SentenceTransformer(str(tmp_path / "mine"), device="cpu").encode(TEXTS) == after).all()


@pytest.mark.slow
def test_without_the_import_it_is_asked_for(sentence_model: Any, tmp_path: Path) -> None:
    with_define(sentence_model, map_dim=16, expand_dim=32, depth=2).save_pretrained(str(tmp_path / "mine"))
    load = f"from sentence_transformers import SentenceTransformer; SentenceTransformer({str(tmp_path / 'mine')!r})"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "write 'import torchdefine.adapt.huggingface' first (pip install 'torchdefine[hf]')" in done.stderr
    subprocess.run([sys.executable, "-c", f"import torchdefine.adapt.huggingface; {load}"], check=True)


def test_static_embeddings_are_replaced_and_restored() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = SentenceTransformer(modules=[models.StaticEmbedding(words, embedding_dim=16)], device="cpu")
    before = model.encode(["a b", "c"])
    report = replace_embeddings(model, map_dim=4, expand_dim=8)
    assert isinstance(model[0].embedding, DeFINEBag)
    one, two, both = model.encode(["a", "b", "a b"])
    assert both == pytest.approx((one + two) / 2, abs=1e-6)
    restore(model, report)
    assert (model.encode(["a b", "c"]) == before).all()
