"""Where a text comes from: a folder, a file or a name; which of its files are for training, validation and testing."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchdefine.config import Config, setting
from torchdefine.data.download import download, extract, keep_hash
from torchdefine.errors import UserError
from torchdefine.files import Progress, cache_folder, from_home, locked, new_folder
from torchdefine.spelling import listed, option

_log = logging.getLogger(__name__)
_SAMPLES = Path(__file__).parent / "samples"

SPLITS = ("train", "valid", "test")
"""The parts of a corpus; it need not have all of them."""

_PACKED = "plain or packed as .gz, .xz or .zst"
CORPUS_LAYOUT = f"a corpus is a folder with train.txt and, if there are any, valid.txt and test.txt, {_PACKED}"
BITEXT_LAYOUT = (
    "a bitext is a folder with train.en and train.de, say, line by line each other's translation, or with a train.tsv "
    f"of two columns, and valid and test files alike, {_PACKED}"
)


@dataclass(frozen=True)
class DataConfig(Config):
    """What the data of every task have."""

    corpus: str = setting(
        "wikitext-2-shuffled", "The text: a named corpus, or a folder with train, valid and test files.", path=True
    )
    tokenizer: str | None = setting(
        None, "A file of the package tokenizers, for subwords. By default, tokens are words.", path=True
    )
    vocabulary_size: int | None = setting(
        None,
        "Size of the published vocabulary. Only `params` uses it; training takes the vocabulary from its text.",
        at_least=1,
    )


@dataclass(frozen=True)
class NamedText:
    """A corpus or a bitext that is known by name."""

    licence: str
    parallel: bool = False
    url: str = ""
    """Of an archive; empty where the text comes with the package, and a NOTICE.md says where from."""
    member: str = ""
    """The archive's texts, with {} for the split."""
    sha256: str | None = None
    """Of the archive; without it the hash of the first download is the one that later ones must have."""


_WIKITEXT = "WikiText-{} is text of Wikipedia under the licence CC BY-SA."
_SMERITY, _MIKOLOV = "https://wikitext.smerity.com", "http://www.fit.vutbr.cz/~imikolov/rnnlm"
_TREEBANK = "The Penn Treebank may not be passed on; its use is subject to the terms of the LDC."
_TATOEBA = "The sentences are by the contributors of Tatoeba (tatoeba.org), under the licence CC BY 2.0 FR."
NAMED_TEXTS = {
    "wikitext-2-shuffled": NamedText(_WIKITEXT.format("2, in another order,")),
    "wikitext-2": NamedText(
        _WIKITEXT.format(2), url=f"{_SMERITY}/wikitext-2-v1.zip", member="wikitext-2/wiki.{}.tokens"
    ),
    "wikitext-103": NamedText(
        _WIKITEXT.format(103), url=f"{_SMERITY}/wikitext-103-v1.zip", member="wikitext-103/wiki.{}.tokens"
    ),
    "ptb": NamedText(_TREEBANK, url=f"{_MIKOLOV}/simple-examples.tgz", member="simple-examples/data/ptb.{}.txt"),
    "tatoeba-en-de": NamedText(_TATOEBA, parallel=True),
}


def corpus_names(*, parallel: bool = False) -> list[str]:
    """Every name that ``resolve_corpus`` knows."""
    return [name for name, text in NAMED_TEXTS.items() if text.parallel == parallel]


def licence_of(name: str) -> str | None:
    """A sentence on the licence of a text that is known by name; None for a user's own."""
    return NAMED_TEXTS[name].licence if name in NAMED_TEXTS else None


def resolve_corpus(
    name_or_path: str | Path,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    *,
    parallel: bool = False,
) -> Path:
    """The folder with the texts of a corpus: an existing folder as it is, else the corpus of that name.

    If ``parallel``, of a bitext, which may also be a .tsv file.
    """
    given, (kind, layout) = str(name_or_path), ("bitext", BITEXT_LAYOUT) if parallel else ("corpus", CORPUS_LAYOUT)
    names = corpus_names(parallel=parallel)
    if not given:
        raise UserError(f"The {kind} is empty text: pass a folder or one of {', '.join(names)}.")
    path = from_home(given)
    if path.exists():
        return path
    if given in names:
        shipped = not NAMED_TEXTS[given].url
        return _SAMPLES / given if shipped else _fetched(given, cache_folder(cache) / "downloads", progress)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    known = f"known by name are {', '.join(names)}, and {layout}; name yours as {option('data')}"
    raise UserError(f"There is neither a folder nor a {kind} called {given}{hint}: {known}.")


def _fetched(name: str, downloads: Path, progress: Progress | None) -> Path:
    """Download and unpack an archive, unless that has been done."""
    folder, text = downloads / name, NAMED_TEXTS[name]
    if folder.is_dir():
        return folder
    archive = downloads / text.url.rpartition("/")[2]
    with locked(archive):
        if not folder.is_dir():  # else another process has fetched it
            sha256 = download(text.url, archive, text.sha256, progress)
            _log.info(text.licence)
            if text.sha256 is None:
                _log.warning("The file from %s is unverified; its SHA-256 is %s.", text.url, sha256)
            try:
                with new_folder(folder) as unpacked:
                    extract(archive, {text.member.format(split): unpacked / f"{split}.txt" for split in SPLITS})
                if text.sha256 is None:
                    keep_hash(archive, sha256)
            finally:
                archive.unlink()  # it is not needed once unpacked, and a damaged one must not stay
    return folder


def find_splits(folder: str | Path, *, require_train: bool = True) -> dict[str, list[Path]]:
    """The files of each split ("train", "valid", "test") of a corpus folder, numbered parts in their order.

    A file belongs to a split if a part of its name says so: train.txt, train-1.txt.xz, wiki.valid.tokens.
    """
    folder = Path(folder)
    files = _files_in(folder, CORPUS_LAYOUT)
    splits = _by_split(files)
    for split, parts in splits.items():
        if len({re.sub(r"[._-]?\d+", "#", part.name) for part in parts}) > 1:
            found = listed([part.name for part in parts])
            raise UserError(f"{folder} has several {split} files ({found}): keep one, or number its parts.")
    if not splits or (require_train and "train" not in splits):
        wanted = "training" if require_train else "train, valid or test"
        found = listed([path.name for path in files]) or "no files"
        raise UserError(f"{folder} has no {wanted} file (found: {found}): {CORPUS_LAYOUT}.")
    return splits


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


def find_bitext(path: str | Path, source: str, target: str, *, require_train: bool = True) -> dict[str, PairedFiles]:
    """The files of each split ("train", "valid", "test") of a bitext; a single .tsv file is a training text."""
    path = Path(path)
    if path.is_file() and _language(path) == "tsv":
        return {"train": PairedFiles([path], None)}
    source, target = source.lower(), target.lower()  # as names are read: zh_CN and ZH_cn mean the same
    files = [file for file in _files_in(path, BITEXT_LAYOUT) if _language(file) in (source, target, "tsv")]
    splits = {split: _paired(path, split, found, source, target) for split, found in _by_split(files).items()}
    if not splits or (require_train and "train" not in splits):
        raise UserError(f"{path} has no training text for {source} and {target}: {BITEXT_LAYOUT}.")
    return splits


def _language(path: Path) -> str:
    """The language or ``tsv``: the last part of the name, without the ending of a packed file."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".xz", ".zst")]
    return suffixes[-1][1:] if suffixes else ""


def _paired(folder: Path, split: str, files: list[Path], source: str, target: str) -> PairedFiles:
    sources, targets = ([file for file in files if _language(file) == own] for own in (source, target))
    if not sources and not targets:
        return PairedFiles(files, None)  # tables
    parts, same_parts = (  # train-1.en.xz and train-1.de.xz both are train-1
        [re.sub(rf"\.{re.escape(own)}(\.\w+)?$", "", file.name, flags=re.IGNORECASE) for file in side]
        for own, side in ((source, sources), (target, targets))
    )
    alike = parts == same_parts and len({re.sub(r"\d+", "#", part) for part in parts}) == 1
    if not alike or len(files) > len(sources) + len(targets):
        found = listed([file.name for file in files])
        raise UserError(
            f"The {split} files of {folder} ({found}) are neither tables nor pairs of the same name that end in "
            f".{source} and .{target}: add, rename or remove some."
        )
    return PairedFiles(sources, targets)


def _files_in(folder: Path, layout: str) -> list[Path]:
    """What may be a text in a folder, train-2 before train-10; a broken link may be meant as one."""
    if folder.is_file():
        raise UserError(f"{folder} is a single file, but {layout}: put it into a folder of its own.")
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: {layout}.")
    files = [path for path in folder.iterdir() if not path.is_dir() and not path.name.startswith(".")]
    return sorted(files, key=_natural_order)


def _natural_order(path: Path) -> list[tuple[int, str]]:
    pieces = re.findall(r"\d+|\D+", path.name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]


def _by_split(files: Iterable[Path]) -> dict[str, list[Path]]:
    """The files whose names have a part that says a split; several splits, and a link to nothing, are refused."""
    also = {"training": "train", "validation": "valid", "val": "valid", "dev": "valid"}
    splits: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in files:
        parts = (part.rstrip("0123456789") for part in re.split(r"[._-]+", path.name.lower()))
        named = sorted({also.get(part, part) for part in parts} & splits.keys())
        if len(named) > 1:
            raise UserError(f"{path} names several splits ({', '.join(named)}): rename it to one of them.")
        if named and not path.exists():
            raise UserError(f"{path} is a link to {path.readlink()}, which is not there: mend the link or remove it.")
        for split in named:
            splits[split].append(path)
    return {split: parts for split, parts in splits.items() if parts}
