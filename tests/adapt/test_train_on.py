"""A model with a table that was fitted to its own is trained on: the table is frozen, unless it is set free."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from tests.adapt.tiny_models import FAMILIES, V, batch
from torchdefine.adapt import FitOptions, fit
from torchdefine.adapt.huggingface import with_table
from torchdefine.tables import METHODS

CASES = [("bert", "bits")] + [
    pytest.param("llama", name, marks=[] if name == "svd" else pytest.mark.slow)
    for name, entry in METHODS.items()
    if entry.in_fit
]


def adapted(name: str, method: str, folder: Path) -> None:
    """Save a model whose table was packed by one method."""
    torch.manual_seed(0)
    model = FAMILIES[name].make(True)
    counts = torch.arange(V, 0, -1) - 1
    with_table(model, fit(model.get_input_embeddings().weight, counts, "6KB", options=FitOptions(methods=[method])))
    model.save_pretrained(folder)


def trained(name: str, folder: Path, out: Path, *, free: bool) -> Any:
    """Load it, train a few steps, and save it."""
    torch.manual_seed(1)
    model = FAMILIES[name].auto_class.from_pretrained(folder).train()
    table = model.get_input_embeddings().table
    assert not any(parameter.requires_grad for parameter in table.parameters())
    if free:
        table.float().requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(4):
        model(**batch(model, labels=True)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(out)
    return model


@pytest.mark.parametrize("free", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(("name", "method"), CASES)
def test_training_on(name: str, method: str, free: bool, tmp_path: Path) -> None:
    adapted(name, method, tmp_path / "start")
    start = FAMILIES[name].auto_class.from_pretrained(tmp_path / "start")
    model = trained(name, tmp_path / "start", tmp_path / "one", free=free)
    trained(name, tmp_path / "start", tmp_path / "two", free=free)
    one, two = (tmp_path / out / "model.safetensors" for out in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()

    before, after = (dict(each.get_input_embeddings().table.named_parameters()) for each in (start, model))
    moved = any(not torch.equal(before[part].float(), after[part].float()) for part in before)
    assert moved == free
    loaded = FAMILIES[name].auto_class.from_pretrained(tmp_path / "one")
    given = batch(model)
    with torch.no_grad():
        kept = loaded.state_dict()
        assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
        # a table that learns is decoded by other operations than one that does not: the last bits may differ
        torch.testing.assert_close(loaded(**given).logits, model(**given).logits, rtol=1e-5, atol=1e-6)
        assert not torch.equal(loaded(**given).logits, start(**given).logits)
    assert {part.dtype for part in after.values()} == {
        part.dtype for part in loaded.get_input_embeddings().table.parameters()
    }


def test_trainer_trains_it_on(tmp_path: Path) -> None:
    adapted("llama", "bits", tmp_path / "start")
    files = []
    for out in ("one", "two"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start")
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / out),
            max_steps=4,
            save_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        )
        rows = [{"input_ids": torch.arange(3, 9) + row, "labels": torch.arange(3, 9) + row} for row in range(32)]
        transformers.Trainer(model, arguments, train_dataset=rows).train()
        files.append((tmp_path / out / "checkpoint-4" / "model.safetensors").read_bytes())
    assert files[0] == files[1]
