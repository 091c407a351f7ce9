"""The recipes masked/wiki78m-… and classifiers made of them: writes results/masked/*.json, some rows at a time.

    python results/run_masked.py prepare wiki78m/ --wordnet DICT --to prepared/    # subwords and texts, on a CPU
    python results/run_masked.py train 32k-standard 32k-define --prepared prepared/ [--steps 12000] [--out OUT]

`prepare` cuts the training text after --words and packs it, so that all fits into one small folder. A row that has its
JSON already is not run again; one that was stopped goes on. The same --steps for all rows, or they do not compare.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
from collections.abc import Sequence
from pathlib import Path

from masked_tables import RUNS, fine_tune

from torchdefine import train
from torchdefine.data import find_splits
from torchdefine.data.text_files import read_texts
from torchdefine.errors import UserError
from torchdefine.tasks.masked.text import MaskedTextConfig, tokenizer_of
from torchdefine.training.progress import LineReporter

SIZES = {"8k": 8_000, "32k": 32_000, "128k": 128_000}
WORDS = 33_000_000
"""So many words take less than 45 MB when they are packed."""
GLOSSES = ("data.noun", "data.verb")


def prepare(text: Path, wordnet: Path, to: Path, words: int) -> None:
    corpus = to / "wiki78m"
    corpus.mkdir(parents=True)
    for split, files in find_splits(text).items():
        with lzma.open(corpus / f"{split}.txt.xz", "wt", encoding="utf-8") as packed:
            left = words
            for block in read_texts(files):
                if left <= 0:
                    break
                packed.write("".join(f"{line}\n" for line in block.lines))
                left -= sum(len(line.split()) for line in block.lines)
    for name, size in SIZES.items():
        tokens = tokenizer_of(MaskedTextConfig(corpus=str(corpus), bpe_size=size), corpus)
        with lzma.open(to / f"{name}.json.xz", "wb") as packed_tokens:
            packed_tokens.write(tokens.save(to / "tokens.json").read_bytes())
    (to / "tokens.json").unlink()
    for name in GLOSSES:
        with lzma.open(to / f"{name}.xz", "wb") as packed_glosses:
            packed_glosses.write((wordnet / name).read_bytes())


def unpacked(prepared: Path, name: str, scratch: Path) -> Path:
    """A file of the prepared folder as it was."""
    scratch.mkdir(parents=True, exist_ok=True)
    with lzma.open(prepared / f"{name}.xz") as packed:
        (scratch / name).write_bytes(packed.read())
    return scratch / name


def run_row(row: str, options: argparse.Namespace) -> None:
    """Train a recipe, keep its result, and make classifiers of it."""
    out, scratch = options.out, options.runs
    kept = out / f"wiki78m-{row}.json"
    if kept.exists():
        return
    tokenizer = unpacked(options.prepared, f"{row.split('-')[0]}.json", scratch)
    for name in GLOSSES:
        unpacked(options.prepared, name, scratch)
    data = {"corpus": str(options.prepared / "wiki78m"), "tokenizer": str(tokenizer)}
    folder = scratch / row
    given = {} if folder.exists() else {"data": data, "train": {"steps": options.steps} if options.steps else {}}
    recipe = None if folder.exists() else f"masked/wiki78m-{row}"
    run = train(recipe, out=folder, resume=folder.exists(), reporter=LineReporter(), **given)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(run.folder.result, kept)
    fine_tune(folder, scratch, from_scratch=False, into=out / "downstream")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("text", type=Path)
    preparing.add_argument("--wordnet", type=Path, required=True, metavar="DICT")
    preparing.add_argument("--to", type=Path, required=True)
    preparing.add_argument("--words", type=int, default=WORDS)
    training = commands.add_parser("train")
    training.add_argument("rows", nargs="+", metavar="ROW", help="such as 32k-define")
    training.add_argument("--prepared", type=Path, required=True)
    training.add_argument("--steps", type=int)
    training.add_argument("--out", type=Path, default=RUNS)
    training.add_argument("--runs", type=Path, default=Path("runs/masked"), help="for runs and what is unpacked")
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        prepare(options.text, options.wordnet, options.to, options.words)
        return
    for row in options.rows:
        if row.split("-")[0] not in SIZES:
            raise UserError(f"The row {row!r} has no vocabulary: begin with 8k, 32k or 128k.")
        run_row(row, options)


if __name__ == "__main__":
    main()
