"""Once: moves the rows of the contests and of equal-bytes to results/leaderboard. Deleted with the next commit."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from leaderboard.measuring import FORMAT
from leaderboard.methods import all_methods

from torchdefine.files import write_json

HERE = Path(__file__).parent
NAMES = {
    "full": "full",
    "ours, instant": "bits",
    "ours, distilled": "distilled",
    "trimmed + int4": "trimmed",
    "faiss product quantisation": "product_quantisation",
    "SVD by counts, 4 bits": "svd_by_counts",
    "PCA as model2vec, int8": "pca",
    "SVD, float16": "svd",
} | {f"torchao int{bits}": "torchao_int" for bits in (8, 4, 2)}
TEXT = {"sentences": 1000, "sha256": "a22c0bd9b4e83c20213b6cbae1ed06e064d79293aebad708a4c1f2f041ff95e1"}
"""The same text gives 56 of energetic's numbers again, to the last digit."""
ORIGIN = ("commit", "versions", "hardware")


def write(table: str, facts: dict[str, Any], rows: list[dict[str, Any]], old: dict[str, Any]) -> None:
    by_method = defaultdict(list)
    for row in rows:
        by_method[row.pop("method")].append(row | {name: old[name] for name in ORIGIN})
    for name, some in by_method.items():
        method = all_methods()[name]
        said = {"name": name, "title": method.title, "settings": dict(method.settings)}
        some.sort(key=lambda row: -row["budget"])
        write_json(
            HERE / "leaderboard" / table / f"{name}.json", {**FORMAT, "table": facts, "method": said, "rows": some}
        )


def row_of(old: dict[str, Any], rows: int) -> dict[str, Any]:
    name = old["name"]
    own = NAMES[name] in ("full", "torchao_int")
    budget = old["bytes"] if own else old["budget"] if "budget" in old else int(old["budget_mb"] * 1e6)
    row: dict[str, Any] = {"method": NAMES[name], "budget": budget, "bytes": old["bytes"], "seed": None}
    row["seconds"] = old.get("seconds")
    if old["bytes"]:
        row |= {"label": name.split()[-1] if "torchao" in name else "", "rows": old.get("tokens", rows)}
        row |= {"tokenizer_bytes": old["tokenizer_bytes"]} if "tokenizer_bytes" in old else {}
        row["measures"] = old["measures"]
    return row


def main() -> None:
    old = json.loads((HERE / "minilm" / "contest.json").read_text())
    facts = {"title": old["model"], "shape": [30522, 384]} | {k: old[k] for k in ("text", "distillation", "wordnet")}
    write("minilm", facts, [row_of(row, 30522) for row in old["rows"]], old)
    for name in ("ja_ginza", "energetic"):
        old = json.loads((HERE / "shrink" / f"{name}.json").read_text())
        facts = {"title": old["table"], "package": old["package"], "sha256": old["sha256"]}
        facts |= {"text": TEXT} if name == "energetic" else {}
        facts |= {"shape": old["shape"], "rows_compared": old["rows_compared"]}
        rows = [row for row in old["rows"] if row["bytes"] or row["name"] != "trimmed + int4"]
        write(name, facts, [row_of(row, old["shape"][0]) for row in rows], old)
    old = json.loads((HERE / "equal-bytes" / "lstm.json").read_text())
    run = json.loads((HERE / "compared" / "lstm.json").read_text())
    assert run["test_perplexity"] == old["whole"]
    facts = {"title": "small LSTM", "shape": old["shape"], "recipe": run["recipe"], "trained_at": run["commit"]}
    facts["test_perplexity"] = old["whole"]
    rows = []
    for one in old["rows"]:
        quality = {"value": one["quality"], "low": one["quality"], "high": one["quality"], "before": old["whole"]}
        names = {"svd": "svd_by_counts", "group-reduce": "group_reduce"}
        row = {"method": names.get(one["method"], one["method"]), "label": one["label"], "rows": old["shape"][0]}
        row |= {"budget": 4 * old["shape"][0] * old["shape"][1] // one["part"], "bytes": one["bytes"], "seed": None}
        rows.append(row | {"seconds": one["seconds"], "measures": {"test perplexity": quality}})
    write("compared-lstm", facts, rows, old)


if __name__ == "__main__":
    main()
