"""The page of the contest at MiniLM's table, made of a few rows."""

import json
from pathlib import Path

import minilm_tables
import pytest


def row(name: str, budget: float, size: int | None) -> dict[str, object]:
    number = {"value": 0.9, "low": 0.88, "high": 0.92, "before": None}
    facts = {
        "tokens": 5,
        "tokenizer_bytes": 7,
        "seconds": 1.0,
        "measures": dict.fromkeys(minilm_tables.MEASURES, number),
    }
    return {"name": name, "budget_mb": budget, "bytes": size, **(facts if size else {})}


def test_every_row_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results" / "minilm"
    folder.mkdir(parents=True)
    (tmp_path / "README.md").write_text("a\n<!-- shrink -->\n<!-- /shrink -->\nb\n")
    monkeypatch.setattr(minilm_tables, "FOLDER", folder)
    text = {"name": "t", "sentences": 9, "measured_on": 1, "sensitivity_from": 2, "distilled_on": 3, "counted": 4}
    rows = [row("full", 46.9, 46_900_000), row("ours", 1.5, 1_500_000), row("ours", 1.0, 900_000), row("PQ", 1.0, None)]
    facts = {"model": "M", "commit": "c" * 40, "versions": {"torch": "2"}, "hardware": {"cpu": "C", "cpu_threads": 1}}
    counted = {"queries": 1, "trained_on": 2, "classified": 3}
    contest = json.loads(json.dumps({**facts, "text": text, "wordnet": counted, "rows": rows}))
    minilm_tables.write_contest(
        contest, {**contest, "rows": [row("full", 46.9, 46_900_000), row("ours", 6.0, 5_900_000)]}
    )
    page = (folder / "README.md").read_text()
    assert "| ours | 900,000 | 5 | 7 | 0.9000 (± 0.0200)" in page
    assert "| PQ | does not fit | –" in page
    assert "| ours | 0.9000 | 0.9000 | 0.9000 |" in (tmp_path / "README.md").read_text()
    assert "| table | 6 MB | 1.5 MB | 1 MB |" in (tmp_path / "README.md").read_text()
    assert "| ours | 5,900,000 | 5 | 7 | 0.9000 (± 0.0200)" in page
    assert (folder / "front.svg").exists()
