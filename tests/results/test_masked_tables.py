"""From a text to the table of classifiers, as results/run_masked.py goes, in small."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from torchdefine import train

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
runs, tables = import_module("run_masked"), import_module("masked_tables")
SMALL: dict[str, Any] = {
    "unit": {"embedding_dim": 32, "expand_dim": 32},
    "embedding": {"map_dim": 8},
    "context": {"layers": 1, "heads": 2, "hidden_dim": 16, "most_places": 64},
    "schedule": {"warmup": 1},
}
LENGTHS = {"batch_size": 4, "length": 16, "steps": 4, "precision": "fp32", "eval_every": 4}


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    """Definitions of two kinds, which their first word tells apart, in the form of WordNet's files."""
    for name, file, kind in (("data.noun", 5, "animal"), ("data.verb", 38, "motion")):
        lines = [f'{i:08} {file:02} n 01 w{i} 0 000 | {(kind + " ") * 5}w{i}; "an example"' for i in range(2_100)]
        (tmp_path / name).write_text("  1 the licence | of it\n" + "\n".join(lines) + "\n")
    return tmp_path


def test_from_a_text_to_the_table(corpus: Path, wordnet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(runs, "SIZES", {"8k": 300})
    monkeypatch.setattr(runs, "train", lambda *a, **o: train(*a, **{**SMALL, **o, "train": {**LENGTHS, **o["train"]}}))
    prepared, out = tmp_path / "prepared", tmp_path / "out"
    runs.main(["prepare", str(corpus), "--wordnet", str(wordnet), "--to", str(prepared)])
    assert sorted(path.name for path in prepared.iterdir()) == ["8k.json.xz", "data.noun.xz", "data.verb.xz", "wiki78m"]
    command = ["train", "8k-define", "--prepared", str(prepared), "--steps", "3", "--out", str(out)]
    runs.main([*command, "--runs", str(tmp_path / "runs")])
    result = json.loads((out / "wiki78m-8k-define.json").read_text())
    assert (result["recipe"], result["steps"]) == ("masked/wiki78m-8k-define", 3)
    found = json.loads((out / "downstream" / "wiki78m-8k-define.json").read_text())["results"]
    assert (found["classes"], found["trained on"], found["measured on"]) == (2, 200, 3_000)
    assert len(found["accuracies"]) == 3
    assert min(found["accuracies"]) > 0.8 > found["most frequent class"]

    monkeypatch.setattr(tables, "RUNS", out)
    monkeypatch.setattr(tables, "DOWNSTREAM", out / "downstream")
    rows = [line.split(" | ") for line in tables.whole_table().splitlines() if line.startswith("| wiki")]
    assert len(rows) == 16
    measured = [row for row in rows if "not run" not in row[-2]]
    assert [(row[1], row[-2]) for row in measured] == [("narrow table, DeFINE", f"{result['test_perplexity']:.1f}")]


def test_a_row_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    refused = partial(pytest.raises, import_module("torchdefine").UserError)
    with refused(match="'64k-define' has no vocabulary"):
        runs.main(["train", "64k-define", "--prepared", str(tmp_path)])
