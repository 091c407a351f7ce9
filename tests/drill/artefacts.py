"""What else only this package writes: encoded texts, embeddings, packed and cached tables, exports."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.drill.mutations import KINDS, anothers
from tests.drill.watch import Watch
from torchdefine import DeFINE, load_run
from torchdefine.data import Corpus, encode_corpus
from torchdefine.errors import MachineError, UserError
from torchdefine.tables import compress_embedding
from torchdefine.tables.compact_table import load_table


def _tokens(folder: Path) -> Any:
    corpus = Corpus.open(folder)
    facts = {split: (text.header, text.tokens.tolist()) for split, text in corpus.splits.items()}
    return facts, corpus.tokenization.counts, corpus.different_words


def _embedding(folder: Path) -> Any:
    return DeFINE.load(folder).eval()(torch.arange(100)).tolist()


def _table(folder: Path) -> Any:
    return load_table(folder / "table.safetensors")(torch.arange(100)).tolist()


def _looked_up(how: str) -> Callable[[Path], Any]:
    return lambda folder: load_run(folder, **{how: True}).embedding(torch.arange(60)).tolist()


def make_artefacts(run: Path, corpus: Path, room: Path) -> dict[str, tuple[Path, Callable[[Path], Any], list[str]]]:
    """By what they are: a folder, how it is read, and which of its files to change."""
    torch.manual_seed(5)
    encode_corpus(corpus, out=room / "tokens")
    DeFINE(100, 24, 8, 32).save(room / "embedding")
    (room / "table").mkdir()
    compress_embedding(DeFINE(100, 24, 8, 32), "int8").table.save(room / "table" / "table.safetensors")
    shutil.copytree(run, room / "run")
    opened = load_run(room / "run")
    cached, packed = list(opened.cache()), list(opened.compress("int8"))

    def beside(files: list[Path]) -> list[str]:
        return [str(file.relative_to(room / "run")) for file in files]

    return {
        "an encoded text": (room / "tokens", _tokens, ["corpus.json", "vocab.txt", "train.tokens", "test.tokens"]),
        "an embedding": (room / "embedding", _embedding, ["embedding.safetensors", "embedding.json"]),
        "a packed table": (room / "table", _table, ["table.safetensors"]),
        "cached vectors": (room / "run", _looked_up("cached"), beside(cached)),
        "compressed vectors": (room / "run", _looked_up("compressed"), beside(packed)),
    }


def drill_artefacts(run: Path, corpus: Path, room: Path, seed: int, count: int) -> Watch:
    random_, watch = random.Random(seed), Watch("mutated texts, embeddings and tables")
    artefacts = make_artefacts(run, corpus, room)
    wanted = {name: read(folder) for name, (folder, read, _) in artefacts.items()}
    for number in range(count):
        name = random_.choice(list(artefacts))
        folder, read, files = artefacts[name]
        file, kind = random_.choice(files), random_.choice([kind for kind in KINDS if kind is not anothers])
        copy = shutil.copytree(folder, room / f"mutated-{number}")
        kind(random_, copy / file, copy / file)
        with watch.case(f"{name} with {kind.__name__} of {file}"):
            try:
                found = read(copy)
            except (UserError, MachineError) as error:
                watch.refused(str(error))
            else:
                if found != wanted[name]:
                    watch.fail("other numbers")
        shutil.rmtree(copy)
    return watch
