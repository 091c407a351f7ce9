"""Files of tensors that only this package writes: every tensor and all facts are compared with a seal when read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchdefine import plain
from torchdefine.errors import UserError, in_a_line
from torchdefine.files import check_is_file, open_failure, replacing, seal_of


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors with the checksum of each, and with a seal of these checksums and of the metadata.

    Each tensor gets memory of its own, as the file needs it: parts of a model may share one under two names.
    """
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().cpu().contiguous()
        memory = whole.untyped_storage().data_ptr()
        apart[name] = whole.clone() if memory in seen else whole
        seen.add(memory)
    sealed = sealed_metadata({name: mark_of(tensor) for name, tensor in apart.items()}, metadata or {})
    with replacing(path) as temporary:
        save_file(apart, temporary, metadata=sealed)
        # The package makes it readable for this user only; other new files are as readable as their new folder.
        temporary.chmod(temporary.parent.stat().st_mode & 0o666)


Mark = list[Any]
"""The type, the shape and the checksum of a tensor in a file."""


def mark_of(tensor: Tensor) -> Mark:
    return [str(tensor.dtype), list(tensor.shape), crc32(bytes_of_tensor(tensor))]


def bytes_of_tensor(tensor: Tensor) -> memoryview:
    flat: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return flat


def sealed_metadata(marks: Mapping[str, Mark], metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a safetensors file with the marks of its tensors, and the hash of both."""
    marked = {**metadata, "tensors": json.dumps(marks)}
    marked.pop("seal", None)
    return {**marked, "seal": seal_of(marked)}


class SealedTensors:
    """An open safetensors file of ours; what is read of it is compared with its seal."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        self.metadata: dict[str, str] = file.metadata() or {}
        """Not yet compared: enough to tell files of other kinds and versions."""

    def read(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names begin so; from here on the metadata can be trusted, too."""
        marked = {name: text for name, text in self.metadata.items() if name != "seal"}
        if self.metadata.get("seal") != seal_of(marked):
            raise ValueError("its header is not what was written")
        marks = plain.read_json(marked["tensors"], "Its list of tensors")
        names = self._file.keys()
        if sorted(marks) != sorted(names):
            raise ValueError("its tensors are not those that were written")
        found = {}
        with self._path.open("rb") as file:  # the package would map the file and copy it: twice the memory
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name in (name for name in names if name.startswith(prefix)):
                dtype, shape, _ = marks[name]
                tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")
                file.seek(8 + length + header[name]["data_offsets"][0])
                file.readinto(bytes_of_tensor(tensor))
                if mark_of(tensor) != marks[name]:
                    raise ValueError(f"the tensor {name} is not what was written")
                found[name] = tensor
        return found


@contextmanager
def reading_safetensors(path: Path, *, if_missing: str, if_damaged: str) -> Iterator[SealedTensors]:
    """A safetensors file to read from; one that cannot be read or understood is refused with advice.

    RuntimeErrors pass: torch raises them for a lack of memory, which is not the file's fault.
    """
    try:
        if path.exists():
            check_is_file(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            yield SealedTensors(path, file)
    except FileNotFoundError:  # the package raises it for unreadable files, too
        if path.exists():
            raise UserError(f"{path} cannot be read: check its permissions.") from None
        raise UserError(f"{path} does not exist: {if_missing}.") from None
    except UserError:
        raise
    except OSError as error:
        raise open_failure(path, error, if_damaged) from None
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is damaged or cut short ({in_a_line(error)}): {if_damaged}.") from None
