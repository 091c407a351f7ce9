"""The folder of transformers with a run's small table and unit inside."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.masked.test_model import SMALL, STYLES, small_model
from torchdefine import UserError
from torchdefine.export import on_the_cpu
from torchdefine.tasks.masked import MaskedTokenizer

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from torchdefine.adapt.stand_in import MapHead, VectorsHead  # noqa: E402
from torchdefine.tasks.masked.transformers_folder import WITH_UNIT, write_transformers  # noqa: E402

PROJECTION = {"kind": "projection", "embedding_dim": 32, "weight_scaling": True}


@pytest.fixture(scope="module")
def tokens() -> MaskedTokenizer:
    from torchdefine.data.tokenizer import train_subwords_on

    return MaskedTokenizer(train_subwords_on([["a small text of few words"] * 9], 280).tokenizer.to_str())


@pytest.mark.parametrize(
    ("style", "unit", "tied", "head"),
    [
        ("ModernBERT", SMALL["unit"], "table", MapHead),
        ("BERT", SMALL["unit"], "finished", VectorsHead),
        ("BERT", PROJECTION, "table", MapHead),
        ("ModernBERT", PROJECTION, "none", torch.nn.Linear),
    ],
)
def test_it_gives_the_same_and_trains_on(
    style: str, unit: dict[str, Any], tied: str, head: type, tokens: MaskedTokenizer, tmp_path: Path
) -> None:
    model = small_model(len(tokens), context=STYLES[style], unit=unit, output={"tied": tied}).eval()
    torch.nn.init.normal_(model.output.bias)
    model = on_the_cpu(model)  # as a run does; it looks the vectors up that the output compares with
    assert write_transformers(model, tokens, tmp_path / "out", "", WITH_UNIT) < 1e-5
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert isinstance(loaded.get_output_embeddings(), head)
    assert sum(p.numel() for p in loaded.parameters()) - sum(p.numel() for p in model.parameters()) <= 32  # token types
    ids = torch.randint(len(tokens), (3, 12))
    theirs = loaded(ids).logits.log_softmax(-1)
    ours = model.output.log_prob(model.head(model.hidden(ids)))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)

    small = loaded.get_input_embeddings().table.map.table.weight
    before, optimiser = small.detach().clone(), torch.optim.Adam(loaded.parameters(), 1e-3)
    loaded.train()(ids, labels=ids).loss.backward()
    optimiser.step()
    assert not torch.equal(small, before)
    loaded.eval().save_pretrained(tmp_path / "on")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "on")
    torch.testing.assert_close(again(ids).logits, loaded(ids).logits, atol=0, rtol=0)


def test_a_classifier_begins_with_it(tokens: MaskedTokenizer, tmp_path: Path) -> None:
    model = small_model(len(tokens), context=STYLES["ModernBERT"]).eval()
    write_transformers(model, tokens, tmp_path / "out", "", WITH_UNIT)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=3).eval()
    ids = torch.randint(len(tokens), (2, 9))
    torch.testing.assert_close(classifier.model(ids).last_hidden_state, model.hidden(ids), atol=1e-5, rtol=1e-5)
    assert classifier(ids).logits.shape == (2, 3)


def test_what_it_cannot_hold_is_refused(tokens: MaskedTokenizer, tmp_path: Path) -> None:
    plain = small_model(len(tokens), unit={"kind": "none"}, embedding={"map_dim": 32}, context=STYLES["BERT"]).eval()
    with pytest.raises(UserError, match="this run has none: use the format transformers"):
        write_transformers(plain, tokens, tmp_path / "out", "", WITH_UNIT)
    assert not (tmp_path / "out").exists()
