"""A folder with the code beside it loads without torchdefine, and gives what the model gives."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from tests.adapt.test_shrink import save_with_tokenizer
from tests.adapt.tiny_models import FAMILIES, V
from tests.commands import command
from torchdefine.adapt import FitOptions, fit
from torchdefine.adapt.huggingface import with_table
from torchdefine.adapt.standalone import write_standalone
from torchdefine.errors import UserError
from torchdefine.tables import METHODS, UnitFitting, quantised_table, unit_table

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

QUICK = [name for name, entry in METHODS.items() if entry.in_fit and name not in ("define", "mlp", "codes")]
IDS = torch.randint(3, V, (4, 11), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def modules_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers copies code to before it runs it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def classifier() -> Any:
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_labels=3,
        pad_token_id=0,
    )
    return transformers.BertForSequenceClassification(config)


def adapted(folder: Path, model: Any, method: str = "bits") -> Any:
    torch.manual_seed(0)
    counts = torch.arange(V, 0, -1) - 1
    fitted = fit(model.get_input_embeddings().weight, counts, "6KB", options=FitOptions(methods=[method]))
    save_with_tokenizer(with_table(model, fitted), folder)
    return model.eval()


@pytest.mark.parametrize("method", QUICK)
def test_every_kind_of_table(method: str, tmp_path: Path) -> None:
    model = adapted(tmp_path / "model", classifier(), method)
    facts = write_standalone(tmp_path / "model", tmp_path / "alone")
    assert facts["classes"] == ["AutoModelForSequenceClassification"]
    code = (tmp_path / "alone" / "modeling_compact.py").read_text()
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    packages = {ast.unparse(node).split()[1].split(".")[0] for node in imported}
    assert packages - sys.stdlib_module_names == {"torch", "transformers"}
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "alone", trust_remote_code=True
    ).eval()
    assert sum(one.nbytes for one in loaded.state_dict().values()) == pytest.approx(
        sum(one.nbytes for one in model.state_dict().values()), abs=100
    )
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-6, atol=1e-6)


def test_the_command_runs_none_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted(tmp_path / "model", classifier())
    assert command("export", tmp_path / "model", "--format", "transformers", "--out", tmp_path / "alone") == 0
    assert "Loading it runs the code in" in capsys.readouterr().out
    assert not (tmp_path / "modules").exists()
    monkeypatch.setattr("builtins.input", lambda *_: "")
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "alone")
    card = (tmp_path / "alone" / "README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained" in card
    settings = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert settings["model_type"] == "compact-bert"
    assert "transformers_weights" not in settings


@pytest.mark.slow
def test_it_loads_where_torchdefine_is_not(tmp_path: Path) -> None:
    model = adapted(tmp_path / "model", classifier())
    write_standalone(tmp_path / "model", tmp_path / "alone")
    with torch.no_grad():
        torch.save(model(IDS).logits, tmp_path / "wanted.pt")
    program = f"""
import sys
sys.modules["torchdefine"] = None  # whoever imports it fails
import torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained({str(tmp_path / "alone")!r}, trust_remote_code=True)
ids = torch.randint(3, {V}, (4, 11), generator=torch.Generator().manual_seed(5))
assert (model.eval()(ids).logits - torch.load({str(tmp_path / "wanted.pt")!r})).abs().max() < 1e-6
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"HF_HOME": str(tmp_path), "PATH": ""})


@pytest.mark.filterwarnings("ignore:The replacement of")
def test_what_cannot_stand_alone(tmp_path: Path) -> None:
    adapted(tmp_path / "tied", FAMILIES["llama"].make(True))
    with pytest.raises(UserError, match="used in several places, which only torchdefine can load"):
        write_standalone(tmp_path / "tied", tmp_path / "out")
    model = classifier()
    save_with_tokenizer(model, tmp_path / "plain")
    with pytest.raises(UserError, match="has no table of torchdefine: make it smaller by adapt first"):
        write_standalone(tmp_path / "plain", tmp_path / "out")
    weight = model.get_input_embeddings().weight
    with_table(model, unit_table(weight, "define", 8, fitting=UnitFitting(steps=2))).save_pretrained(tmp_path / "unit")
    shutil.copyfile(tmp_path / "plain" / "tokenizer.json", tmp_path / "unit" / "tokenizer.json")
    with pytest.raises(UserError, match="has a fitted unit"):
        write_standalone(tmp_path / "unit", tmp_path / "out")
    settings = json.loads((tmp_path / "unit" / "config.json").read_text())
    (tmp_path / "unit" / "config.json").write_text(json.dumps(settings | {"architectures": ["BertModel):\n    x"]}))
    with pytest.raises(UserError):  # nothing of a folder's own gets into the code
        write_standalone(tmp_path / "unit", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_table_of_few_bits_alone(tmp_path: Path) -> None:
    model = classifier().eval()
    save_with_tokenizer(with_table(model, quantised_table(model.get_input_embeddings().weight, bits=3)), tmp_path / "m")
    write_standalone(tmp_path / "m", tmp_path / "alone")
    code = (tmp_path / "alone" / "modeling_compact.py").read_text()
    assert "class QuantisedRows" in code
    assert "BandedRows" not in code
