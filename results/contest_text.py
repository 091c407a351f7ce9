"""The sentences that `python -m leaderboard` judges English models by: as many of each text, by hash.

    python results/contest_text.py tatoeba.en.xz europarl/train.en.xz wiki78m/train-1.txt.xz --out sentences.txt

Lines are cut after full stops; marks of tokenisation (" @-@ ", spaces before commas) are undone. Sentences of 3 to 60
words count, and those without an unknown word.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from itertools import islice
from pathlib import Path

from torchdefine.data import read_text

OF_EACH, READ_BYTES = 120_000, 60 << 20
FEWEST, MOST = 3, 60
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"(])")
UNDONE = (
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r" ([,.;:!?)])"), r"\1"),
    (re.compile(r"\( "), "("),
    (re.compile(r" ('(?:s|t|re|ve|ll|d|m)\b)"), r"\1"),
)


def by_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def sentences(path: Path) -> list[str]:
    """The different sentences of the file's beginning, in the order of their hashes."""
    found, read = set(), 0
    for block in read_text(path):
        for line in block.lines:
            for pattern, given in UNDONE:
                line = pattern.sub(given, line)
            pieces = (piece.strip() for piece in END.split(line))
            found |= {one for one in pieces if FEWEST <= len(one.split()) <= MOST and "<unk>" not in one}
        read += len(block.raw)
        if read >= READ_BYTES:
            break
    return sorted((one for one in found if not one.startswith("=")), key=by_hash)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    chosen = {one for path in arguments.texts for one in islice(sentences(path), OF_EACH)}
    arguments.out.write_text("\n".join(sorted(chosen, key=by_hash)) + "\n")
    print(f"{len(chosen):,} sentences in {arguments.out}")


if __name__ == "__main__":
    main()
