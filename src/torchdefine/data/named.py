"""Corpora that are known by name: one comes with the package, the others are downloaded when first used."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchdefine.data.bitext_files import BITEXT_LAYOUT
from torchdefine.data.download import download, extract, hash_record, one_at_a_time
from torchdefine.data.text_files import FOLDER_LAYOUT, find_splits
from torchdefine.errors import MachineError, UserError
from torchdefine.files import Progress, cache_folder
from torchdefine.spelling import option

_log = logging.getLogger(__name__)
_SAMPLES = Path(__file__).parent / "samples"

SHIPPED = ("wikitext-2-shuffled",)
"""Corpora inside the package; a NOTICE.md beside each says where it comes from and under which licence."""

SHIPPED_BITEXTS = ("tatoeba-en-de",)
"""Parallel texts inside the package, likewise with a notice."""

SHIPPED_LICENCES = {
    "wikitext-2-shuffled": "WikiText-2, in another order, is text of Wikipedia under the licence CC BY-SA.",
    "tatoeba-en-de": "The sentences are by the contributors of Tatoeba (tatoeba.org), under the licence CC BY 2.0 FR.",
}


@dataclass(frozen=True)
class DownloadableCorpus:
    """An archive on the network with a training, a validation and a test text in it."""

    name: str
    url: str
    train: str
    valid: str
    test: str
    licence: str
    sha256: str | None = None


DOWNLOADABLE = {
    corpus.name: corpus
    for corpus in (
        DownloadableCorpus(
            name="wikitext-2",
            url="https://wikitext.smerity.com/wikitext-2-v1.zip",
            train="wikitext-2/wiki.train.tokens",
            valid="wikitext-2/wiki.valid.tokens",
            test="wikitext-2/wiki.test.tokens",
            licence="WikiText-2 is text of Wikipedia under the licence CC BY-SA.",
        ),
        DownloadableCorpus(
            name="wikitext-103",
            url="https://wikitext.smerity.com/wikitext-103-v1.zip",
            train="wikitext-103/wiki.train.tokens",
            valid="wikitext-103/wiki.valid.tokens",
            test="wikitext-103/wiki.test.tokens",
            licence="WikiText-103 is text of Wikipedia under the licence CC BY-SA.",
        ),
        DownloadableCorpus(
            name="ptb",
            url="http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
            train="simple-examples/data/ptb.train.txt",
            valid="simple-examples/data/ptb.valid.txt",
            test="simple-examples/data/ptb.test.txt",
            licence="The Penn Treebank may not be passed on; its use is subject to the terms of the LDC.",
        ),
    )
}


def corpus_names() -> list[str]:
    """Every name that ``resolve_corpus`` knows."""
    return [*SHIPPED, *DOWNLOADABLE]


def licence_of(corpus: str) -> str | None:
    """A sentence on the licence of a corpus that is known by name; None for a user's own text."""
    return DOWNLOADABLE[corpus].licence if corpus in DOWNLOADABLE else SHIPPED_LICENCES.get(corpus)


def resolve_corpus(name_or_path: str | Path, cache: str | Path | None = None, progress: Progress | None = None) -> Path:
    """The folder with the texts of a corpus: an existing folder as it is, else the corpus of that name."""
    if not str(name_or_path):
        raise UserError(f"The corpus is empty text: pass a folder or one of {', '.join(corpus_names())}.")
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        find_splits(path)  # refuses it, with the sentence on what a corpus looks like
    name = str(name_or_path)
    if name in SHIPPED:
        return _SAMPLES / name
    if name in DOWNLOADABLE:
        return _fetched(DOWNLOADABLE[name], cache_folder(cache) / "downloads", progress)
    close = difflib.get_close_matches(name, corpus_names(), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise UserError(
        f"There is neither a folder nor a corpus called {name}{hint}: the known corpora are "
        f"{', '.join(corpus_names())}, and {FOLDER_LAYOUT}."
    )


def resolve_bitext(name_or_path: str | Path) -> Path:
    """The folder (or .tsv file) of a bitext: an existing one as it is, else the shipped one of that name."""
    path = Path(name_or_path).expanduser()
    if str(name_or_path) and path.exists():
        return path
    if str(name_or_path) in SHIPPED_BITEXTS:
        return _SAMPLES / str(name_or_path)
    raise UserError(
        f"There is neither a folder nor a bitext called {str(name_or_path)!r}: {', '.join(SHIPPED_BITEXTS)} comes with "
        f"torchdefine, and {BITEXT_LAYOUT}; name yours as {option('data')}."
    )


def _fetched(corpus: DownloadableCorpus, downloads: Path, progress: Progress | None) -> Path:
    """Download and unpack a corpus, unless that has been done."""
    folder = downloads / corpus.name
    members = {
        corpus.train: folder / "train.txt",
        corpus.valid: folder / "valid.txt",
        corpus.test: folder / "test.txt",
    }
    if all(text.is_file() for text in members.values()):
        return folder
    archive = downloads / corpus.url.rpartition("/")[2]
    with one_at_a_time(archive):
        if not all(text.is_file() for text in members.values()):  # another process may have fetched it
            _fetch(corpus, archive, members, progress)
    return folder


def _fetch(corpus: DownloadableCorpus, archive: Path, members: Mapping[str, Path], progress: Progress | None) -> None:
    fetched = download(corpus.url, archive, corpus.sha256, progress)
    _log.info(corpus.licence)
    if not fetched.verified:
        _log.warning("The file from %s is unverified; its SHA-256 is %s.", corpus.url, fetched.sha256)
    try:
        extract(archive, members)
    except MachineError:
        hash_record(archive).unlink(missing_ok=True)  # else every later download would need the damaged file's hash
        raise
    finally:
        archive.unlink()  # it is not needed once unpacked, and a damaged one must not stay
