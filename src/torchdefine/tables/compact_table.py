"""A V × m table in few bytes and one file: a look-up like ``nn.Embedding`` that decodes only what it needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from torchdefine import __version__
from torchdefine.embedding.map import as_ids, check_table
from torchdefine.errors import UserError
from torchdefine.files import check_path
from torchdefine.ops import only_values
from torchdefine.plain import read_json
from torchdefine.sealed_tensors import reading_safetensors, write_safetensors
from torchdefine.tables.rows import Rows, frozen, rows_from

FORMAT = "torchdefine compact table"
FORMAT_VERSION = 1
_HASHED_AT_ONCE = 1 << 20  # numbers


class CompactTable(torch.nn.Module):
    """Token ids → the vectors that a table had, rebuilt from ``rows``; (…) → (…, embedding_dim).

    ``mean`` is added to every vector; its dtype is that of the vectors, so ``.to(torch.bfloat16)`` does what it does
    for ``nn.Embedding``. The vector of ``padding_idx`` is always zero. Nothing learns until ``requires_grad_()``.
    """

    def __init__(self, rows: Rows, mean: Tensor | None = None, padding_idx: int | None = None) -> None:
        super().__init__()
        self.padding_idx = check_table(rows.num_rows, rows.width, padding_idx)
        self.num_embeddings, self.embedding_dim = rows.num_rows, rows.width
        self.rows = rows
        device = next(rows.parameters()).device
        self.mean = frozen(torch.zeros(rows.width, device=device) if mean is None else mean.detach().float().clone())

    def forward(self, ids: Tensor) -> Tensor:
        """(…) whole numbers → (…, embedding_dim)."""
        if only_values(ids, self._parameters["mean"]):
            vectors = self._values(ids)
        else:
            vectors = self.mean + self.rows(as_ids(ids, self.num_embeddings), self.mean.dtype)  # (…, m)
        if self.padding_idx is not None:
            vectors = vectors.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
        return vectors

    def _values(self, ids: Tensor) -> Tensor:
        """As short as possible: a look-up of a few ids takes less time than a few lines of Python."""
        rows: Any = self._modules["rows"]  # nn.Module takes half a microsecond to find a part, and more to call it
        mean: Any = self._parameters["mean"]
        if not (rows.refuses and ids.dtype is torch.int64):
            ids = as_ids(ids, self.num_embeddings)
        try:
            vectors: Tensor = rows.added_to(mean, ids)  # (…, m)
        except (IndexError, RuntimeError):
            as_ids(ids, self.num_embeddings)  # says what is wrong with them
            raise
        return vectors

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden vectors times all vectors of the table: (…, embedding_dim) → (…, num_embeddings).

        An output layer tied to the table: no matrix of all vectors is made.
        """
        found = self.rows.products(hidden) + (hidden @ self.mean.to(hidden.dtype)).unsqueeze(-1)
        if self.padding_idx is not None:
            ids = torch.arange(self.num_embeddings, device=hidden.device)
            found = found.masked_fill(ids == self.padding_idx, 0.0)
        return found

    @property
    def stored_bytes(self) -> int:
        """The bytes of all tensors, in memory and in a file; the file's header comes on top."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    @property
    def num_values(self) -> int:
        """Numbers stored, floats and codes alike: the parameters of the table."""
        codes = sum(rows.own_codes for rows in self.rows.modules() if isinstance(rows, Rows))
        return codes + sum(parameter.numel() for parameter in self.parameters())

    def to_config(self) -> dict[str, Any]:
        """What ``from_config`` needs to build the same module, empty; plain values only."""
        rows = self.rows.described()
        return {"format": FORMAT, "version": FORMAT_VERSION, "rows": rows, "padding_idx": self.padding_idx}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        check_version(config)
        return cls(rows_from(config["rows"]), padding_idx=config["padding_idx"])

    def save(self, path: str | Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write one safetensors file, whole or not at all; ``facts`` say what the table was made from."""
        header = {"config": json.dumps(self.to_config()), "facts": json.dumps(dict(facts or {}))}
        write_safetensors(
            Path(path), self.state_dict(), {"format": FORMAT, "torchdefine_version": __version__, **header}
        )


def check_version(config: Mapping[str, Any]) -> None:
    if config.get("format") != FORMAT or config.get("version") != FORMAT_VERSION:
        raise UserError(
            f"Expected a {FORMAT} of version {FORMAT_VERSION}, but found {config.get('format')!r} of version "
            f"{config.get('version')!r}: make the table again with a matching torchdefine."
        )


def load_table(path: str | Path, facts: Mapping[str, Any] | None = None) -> CompactTable:
    """Read what ``CompactTable.save`` wrote, on the CPU.

    A file that is cut short or of another kind is refused, and so is one whose facts differ from those in ``facts``
    (the vocabulary's hash, say).
    """
    path = check_path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the file of a table in it.")
    with reading_safetensors(
        path, if_missing="check the name of the table", if_damaged="make the table again, or copy it again"
    ) as file:
        if file.metadata.get("format") != FORMAT:
            raise UserError(f"{path} is not a {FORMAT}: give a file that CompactTable.save wrote.")
        stored, config = (read_json(file.metadata[part], f"The header of {path}") for part in ("facts", "config"))
        for name, value in (facts or {}).items():
            if stored.get(name) != value:
                made_for = f"{name.removesuffix('_sha256')} {_shortened(stored.get(name))}, not {_shortened(value)}"
                raise UserError(f"The table {path} was made for {made_for}: make it again.")
        check_version(config)
        tensors = file.read()
        with torch.device("meta"):  # the file's tensors replace these, so nothing is allocated twice
            table = CompactTable.from_config(config)
        for name, empty in table.state_dict().items():
            if name in tensors and tensors[name].dtype.is_floating_point != empty.dtype.is_floating_point:
                raise ValueError(f"{name} is {tensors[name].dtype}")
        try:
            table.load_state_dict(tensors, assign=True)
        except RuntimeError as error:  # names or shapes of another table
            raise ValueError(str(error)) from None
    return table


def table_bytes(empty: Callable[[], Rows]) -> int:
    """The bytes of a table of such rows; nothing is allocated to find out."""
    with torch.device("meta"):
        return CompactTable(empty()).stored_bytes


def sha256_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes, types and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for part in tensor.detach().reshape(-1).split(_HASHED_AT_ONCE):  # little memory beside the tensor on a GPU
            digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _shortened(value: Any) -> str:
    """The beginning of a hash, which is enough to tell it apart; other values whole."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else repr(value)
