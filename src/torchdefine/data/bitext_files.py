"""Parallel text: which files hold it, and its pairs of sentences in bounded memory.

A bitext is a folder with two files for each split that differ in the language only, such as ``train.en`` and
``train.de``, or with one file of two columns, such as ``train.tsv``; each plain or packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchdefine.data.text_files import SPLITS, is_candidate, natural_order, read_text, split_named_by
from torchdefine.errors import UserError

BITEXT_LAYOUT = (
    "a bitext is a folder with two training files such as train.en and train.de, line by line each other's "
    "translation, or with one train.tsv of two columns, and valid and test files alike, each plain or packed as .gz, "
    ".xz or .zst"
)
_PACKED = (".gz", ".xz", ".zst")


@dataclass(frozen=True)
class PairedFiles:
    """The files of one split, parts in their order; ``target`` is None where ``source`` are files of two columns."""

    source: list[Path]
    target: list[Path] | None

    @property
    def all(self) -> list[Path]:
        return [*self.source, *(self.target or [])]

    @property
    def name(self) -> str:
        return " with ".join(str(path) for path in self.all)


@dataclass(frozen=True)
class PairBlock:
    """Some pairs of lines, as they stand in the files."""

    source: list[str]
    target: list[str]
    disk_bytes: int


def find_bitext(path: str | Path, source: str, target: str, *, require_train: bool = True) -> dict[str, PairedFiles]:
    """The files of each split ("train", "valid", "test") of a bitext; a single .tsv file is a training text."""
    path = Path(path)
    if path.is_file():
        if _kind(path) != "tsv":
            raise UserError(f"{path} is a single file, but {BITEXT_LAYOUT}.")
        return {"train": PairedFiles([path], None)}
    if not path.is_dir():
        raise UserError(f"There is no folder {path}: {BITEXT_LAYOUT}.")
    if source.lower() == target.lower():
        raise UserError(f"The source and the target language are both {source!r}: name two endings of file names.")
    source, target = source.lower(), target.lower()  # as names are read: zh_CN and ZH_cn mean the same
    found: dict[str, dict[str, list[Path]]] = {}
    for file in sorted((file for file in path.iterdir() if is_candidate(file)), key=natural_order):
        if _kind(file) in (source, target, "tsv") and (split := split_named_by(file)):
            found.setdefault(split, {}).setdefault(_kind(file), []).append(file)
    splits = {split: _paired(path, split, kinds, source, target) for split, kinds in found.items()}
    if not splits or (require_train and "train" not in splits):
        raise UserError(f"{path} has no training text for {source} and {target}: {BITEXT_LAYOUT}.")
    return {split: splits[split] for split in SPLITS if split in splits}


def _kind(path: Path) -> str:
    """The language or ``tsv``: the last part of the name, without the ending of a packed file."""
    suffixes = [suffix for suffix in path.suffixes if suffix.lower() not in _PACKED]
    return suffixes[-1][1:].lower() if suffixes else ""


def _paired(folder: Path, split: str, kinds: dict[str, list[Path]], source: str, target: str) -> PairedFiles:
    names = ", ".join(file.name for files in kinds.values() for file in files)
    if "tsv" in kinds and len(kinds) > 1:
        raise UserError(f"{folder} has both a table and parallel {split} files ({names}): keep one of the two.")
    if "tsv" in kinds:
        return PairedFiles(kinds["tsv"], None)
    for language in (source, target):
        if language not in kinds:
            raise UserError(f"{folder} has {names}, but no {split} file that ends in .{language}: add it.")
    parts = [[_without_language(file, language) for file in kinds[language]] for language in (source, target)]
    if parts[0] != parts[1] or len({re.sub(r"\d+", "#", part) for part in parts[0]}) > 1:
        raise UserError(f"The {split} files of {folder} are not pairs of the same name ({names}): rename them.")
    return PairedFiles(kinds[source], kinds[target])


def _without_language(file: Path, language: str) -> str:
    """train-1.en.xz and train-1.de.xz both are train-1."""
    return re.sub(rf"\.{re.escape(language)}(\.\w+)?$", "", file.name, flags=re.IGNORECASE)


def read_pairs(files: PairedFiles) -> Iterator[PairBlock]:
    """Stream the pairs of a split; sides of unequal length and rows without two columns are a UserError."""
    if files.target is None:
        yield from _read_tables(files.source)
        return
    sides = (_blocks(files.source), _blocks(files.target))
    waiting: tuple[list[str], list[str]] = ([], [])
    lines, disk_bytes = [0, 0], 0
    ended = [False, False]
    while not all(ended):
        for side in (0, 1):
            if not ended[side] and len(waiting[side]) <= len(waiting[1 - side]):
                block = next(sides[side], None)
                ended[side] = block is None
                if block is not None:
                    waiting[side].extend(block[0])
                    lines[side] += len(block[0])
                    disk_bytes += block[1]
        both = min(map(len, waiting))
        if both:
            yield PairBlock(waiting[0][:both], waiting[1][:both], disk_bytes)
            disk_bytes = 0
            del waiting[0][:both], waiting[1][:both]
        for side in (0, 1):
            if ended[side] and len(waiting[1 - side]) > len(waiting[side]):  # the other side only needs counting now
                lines[1 - side] += sum(len(block[0]) for block in sides[1 - side])
                ended = [True, True]
    if lines[0] != lines[1]:
        raise UserError(
            f"{files.source[0]} has {lines[0]:,} lines and {files.target[0]} has {lines[1]:,}, but line must stand for "
            "line: align them again."
        )


def _blocks(parts: Sequence[Path]) -> Iterator[tuple[list[str], int]]:
    for part in parts:
        for block in read_text(part):
            yield block.lines, block.disk_bytes


def _read_tables(parts: Sequence[Path]) -> Iterator[PairBlock]:
    for part in parts:
        number = 0
        for block in read_text(part):
            rows = []
            for line in block.lines:
                number += 1
                columns = line.split("\t")
                if len(columns) < 2:
                    raise UserError(
                        f"Line {number:,} of {part} has no second column: put the source, a tab and the target on "
                        "each line."
                    )
                rows.append(columns)
            yield PairBlock([row[0] for row in rows], [row[1] for row in rows], block.disk_bytes)
