"""Folders with encoded text: made once, by one process, and opened by all others.

In the cache such a folder is named by a hash of the source files (path, size, time of change) and of the settings. Its
manifest has the format version, the name and the splits, and is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torchdefine.errors import UserError
from torchdefine.files import cache_folder, locked, write_text
from torchdefine.spelling import option

VERSION = 1

E = TypeVar("E")


def encoded_once(folder: Path, open_folder: Callable[[Path], E], encode: Callable[[Path], None]) -> E:
    """Open a folder of the cache; one that is not there, or is damaged, is filled first."""

    def opened() -> E | None:
        with suppress(UserError):
            return open_folder(folder)
        return None

    found = opened()
    if found is None:
        with locked(folder):
            found = opened()  # another process may have filled it
            if found is None:
                encode(folder)
                found = open_folder(folder)
    return found


def place_in_cache(
    kind: str, name: str, cache: str | Path | None, texts: Mapping[str, Sequence[Path]], settings: Sequence[Any]
) -> Path:
    """The folder for texts that are encoded by some settings."""
    files = {split: [_identity(path) for path in paths] for split, paths in texts.items()}
    key = hashlib.sha256(json.dumps([VERSION, files, settings]).encode()).hexdigest()
    return cache_folder(cache) / kind / f"{name}-{key[:16]}"


def _identity(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def write_manifest(path: Path, name: str, splits: Sequence[str], **facts: Any) -> None:
    write_text(path, json.dumps({"version": VERSION, "name": name, "splits": list(splits), **facts}))


def has_manifest(path: Path) -> bool:
    """Whether a manifest is there, rather than a file of the user's own that is called the same."""
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"version", "name", "splits"} <= manifest.keys()


def read_manifest(path: Path) -> dict[str, Any]:
    """What ``write_manifest`` wrote."""
    if not has_manifest(path):
        raise UserError(f"{path.parent} is not a folder with an encoded {path.stem}: {path.name} is missing.")
    manifest: dict[str, Any] = json.loads(path.read_bytes())
    if manifest["version"] != VERSION:
        raise UserError(
            f"The encoded {path.stem} in {path.parent} has format version {manifest['version']}, but this torchdefine "
            f"reads version {VERSION}: encode the text again; a folder of the cache may be deleted for that."
        )
    return manifest


def require_split(splits: Mapping[str, E], split: str, source: Path) -> E:
    if split not in splits:
        raise UserError(
            f"{source} has no {split} text: it has {', '.join(splits)}; name another text by {option('data')}."
        )
    return splits[split]
