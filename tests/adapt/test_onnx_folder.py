"""A model with a packed table as ONNX gives in onnxruntime what it gives in torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
import onnxruntime
import transformers

from tests.adapt.test_shrink import save_with_tokenizer
from tests.adapt.tiny_models import FAMILIES, V
from tests.commands import command
from torchdefine.adapt import FitOptions, fit, onnx_folder
from torchdefine.adapt.huggingface import with_table
from torchdefine.adapt.onnx_folder import export_onnx
from torchdefine.errors import MachineError, UserError
from torchdefine.tables import METHODS, quantised_table
from torchdefine.tables.trellis import codebooks

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore")


def adapted(folder: Path, name: str, bits: int | None = None, method: str = "bits") -> Any:
    """A model with a packed table, saved with its tokenizer; twice as wide as the others, for groups of 32."""
    torch.manual_seed(0)
    model = FAMILIES[name].make(True).eval()
    weight = model.get_input_embeddings().weight
    if bits:
        table: Any = quantised_table(weight, bits=bits)
    else:
        counts = torch.arange(V, 0, -1) - 1
        table = fit(weight, counts, "6KB", options=FitOptions(methods=[method])).table
    save_with_tokenizer(with_table(model, table), folder)
    return model


def run(folder: Path, **given: Any) -> torch.Tensor:
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    names = {port.name for port in session.get_inputs()}
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in given.items() if name in names})
    return torch.from_numpy(found)


def compared(model: Any, folder: Path) -> None:
    ids = torch.randint(3, V, (4, 11), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits
    found = run(folder, input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_folder_with_one_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four bits are read by onnxruntime's own operator, from as few bytes."""
    model = adapted(tmp_path / "model", "bert", bits=4)
    given = ["export", tmp_path / "model", "--format", "onnx", "--out"]
    assert command(*given, tmp_path / "onnx") == 0
    assert "largest difference from the model" in capsys.readouterr().out
    compared(model, tmp_path / "onnx")
    assert b"GatherBlockQuantized" in (tmp_path / "onnx" / "onnx" / "model.onnx").read_bytes()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "onnx")
    assert type(config) is transformers.BertConfig
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "onnx")("w5 w7")["input_ids"] == [5, 7]
    card = (tmp_path / "onnx" / "README.md").read_text()
    assert "`logits`" in card
    assert "GatherBlockQuantized, 4 bits" in card
    monkeypatch.chdir(tmp_path / "onnx")
    exec(card.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out == "(1, 5, 97)\n"
    assert (tmp_path / "onnx" / "README.before.md").read_text() == "the model's own"
    assert not (tmp_path / "onnx" / "model.safetensors").exists()
    assert command(*given, tmp_path / "again", "--cached") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [("bert", name) for name, entry in METHODS.items() if entry.in_fit and name not in ("define", "mlp", "codes")]
    + [("llama", "bits"), ("gpt2", "svd")],
)
def test_other_kinds_of_tables_and_models(name: str, method: str, tmp_path: Path) -> None:
    model = adapted(tmp_path / "model", name, method=method)
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    compared(model, tmp_path / "onnx")
    if method == "bits":
        codebook = codebooks(12, torch.device("cpu")).numpy().tobytes()
        assert (tmp_path / "onnx" / "onnx" / "model.onnx").read_bytes().count(codebook) == 1


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_a_tied_output_layer_of_few_bits(bits: int, tmp_path: Path) -> None:
    model = adapted(tmp_path / "model", "llama", bits=bits)
    facts = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert facts["operators"] == ([] if bits == 3 else [f"GatherBlockQuantized, {bits} bits"])
    compared(model, tmp_path / "onnx")


def test_what_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted(tmp_path / "model", "bert", bits=4)
    monkeypatch.setattr(onnx_folder, "_write", lambda whole, path: None)
    monkeypatch.setattr(onnx_folder, "_difference", lambda whole, path: 0.5)
    with pytest.raises(MachineError, match=r"differs from the model by 5\.0e-01, so nothing was written"):
        export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_a_model_whose_rest_is_rounded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(tmp_path / "model", "bert", bits=4)
    model.config.quantization_config = {"quant_method": "torchao"}
    monkeypatch.setattr(onnx_folder, "open_model", lambda *_, **__: (model, None))
    with pytest.raises(UserError, match="in int8 by torchao, which cannot become ONNX"):
        export_onnx(tmp_path / "model", tmp_path / "onnx")


def test_two_programs_in_turns_are_refused(tmp_path: Path) -> None:
    adapted(tmp_path / "model", "t5", bits=4)
    with pytest.raises(UserError, match="T5ForConditionalGeneration has an encoder and a decoder"):
        export_onnx(tmp_path / "model", tmp_path / "onnx")


def test_the_card_tells_what_adapt_measured(tmp_path: Path) -> None:
    from torchdefine.adapt.adapted_card import adapted_card

    fits = {"embeddings": {"chosen": "bits by importance", "budget_bytes": 5_000}}
    report = {
        "versions": {"torchdefine": "0.1.0"},
        "held_out": {"sentences": 30, "cosine": {"value": 0.98765, "low": 0.98, "high": 0.99, "before": None}},
        "vocabulary": {"choice": "trim", "tokens": [97, 50], "tokenizer_bytes": [2_000, 1_000]},
        "tables": [{"names": ["embeddings"], "bytes_after": 4_900, "bytes_before": 12_416}],
        "fits": fits,
    }
    (tmp_path / "adapt.json").write_text(json.dumps(report))
    program = {"file": "onnx/model.onnx", "inputs": ["input_ids"], "output": "logits", "bytes": 9, "operators": []}
    card = adapted_card(tmp_path, "BertModel", {**program, "largest_difference": 1e-6})
    assert "| embeddings | bits by importance | 4,900 | 12,416 |" in card
    assert "Tokens kept: 50 of 97. Tokenizer files: 1,000 of 2,000 bytes." in card
    assert "on 30 held-out sentences" in card
    assert "- cosine: 0.9877 (0.9800 to 0.9900)" in card
    assert "--budget 5000B --vocabulary trim" in card
