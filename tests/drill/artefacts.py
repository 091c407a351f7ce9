"""What else only this package writes: encoded texts, embeddings, packed and cached tables, exports."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.drill.mutations import KINDS, anothers, contents
from tests.drill.watch import Watch
from torchdefine import DeFINE, load_run
from torchdefine.data import Corpus, encode_corpus
from torchdefine.errors import MachineError, UserError
from torchdefine.export.folder import CARD_FILE, load_export
from torchdefine.export.program import sampled
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


def _programs(folder: Path) -> Any:
    """What an export says, and what its programs give."""
    export = load_export(folder)
    sizes = {"batch": 2, "length": 3}
    programs = export.programs.items()
    given = {name: [t.tolist() for t in one.runner(sampled(one.inputs, sizes, 0))] for name, one in programs}
    return export.facts, export.tokenization.sha256, given


def drill_artefacts(run: Path, corpus: Path, room: Path, seed: int | str, count: int) -> Watch:
    return _changed(make_artefacts(run, corpus, room), room, seed, count)


def drill_exports(export: Path, other: Path, room: Path, seed: int | str, count: int) -> Watch:
    """Files of an export, which may also be those of another model."""
    shutil.copytree(export, room / "whole")
    files = sorted(file.name for file in export.iterdir() if file.name != CARD_FILE)  # people edit the card
    watch = _changed({"an export": (room / "whole", _programs, files)}, room, seed, count - 1)
    mixed = shutil.copytree(export, room / "mixed")
    shutil.copy(other / "best" / "checkpoint.safetensors", mixed / "model.safetensors")
    with watch.case("weights of another model"):
        try:
            _programs(mixed)
        except UserError as error:
            watch.refused(str(error))
        else:
            watch.fail("was opened")
    return watch


def _changed(
    artefacts: dict[str, tuple[Path, Callable[[Path], Any], list[str]]], room: Path, seed: int | str, count: int
) -> Watch:
    random_, watch = random.Random(seed), Watch()
    wanted = {name: read(folder) for name, (folder, read, _) in artefacts.items()}
    for number in range(count):
        name = random_.choice(list(artefacts))
        folder, read, files = artefacts[name]
        file, kind = random_.choice(files), random_.choice([kind for kind in KINDS if kind is not anothers])
        copy = shutil.copytree(folder, room / f"mutated-{number}")
        kind(random_, copy / file, copy / file)
        before = contents(copy)
        with watch.case(f"{name} with {kind.__name__} of {file}"):
            try:
                found = read(copy)
            except (UserError, MachineError) as error:
                watch.refused(str(error))
            else:
                if found != wanted[name]:
                    watch.fail("other numbers")
            if contents(copy) != before:
                watch.fail("reading changed files")
        shutil.rmtree(copy)
    return watch
