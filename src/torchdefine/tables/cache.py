"""The vectors of an embedding in a file beside its weights, so that inference only looks them up.

Cached vectors are one safetensors tensor, V × m, written chunk by chunk: a vocabulary of millions needs no more memory
than its map. Compressed ones are a compact table. Both files carry a hash of the weights that they were made from, and
are refused with any others.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.table import id_chunks, in_evaluation
from torchdefine.errors import UserError
from torchdefine.files import Progress, atomic_file
from torchdefine.sealed_tensors import bytes_of_tensor, reading_safetensors, sealed_metadata
from torchdefine.tables.compact_table import load_table, sha256_of_tensors
from torchdefine.tables.methods import Compressed

FORMAT = "torchdefine cache"
FORMAT_VERSION = "1"
HEADER_BYTES = 1024
DTYPES = {"fp32": ("F32", torch.float32), "bf16": ("BF16", torch.bfloat16), "fp16": ("F16", torch.float16)}


@torch.no_grad()
def write_cache(path: Path, embedding: TokenEmbedding, dtype: str = "fp32", progress: Progress | None = None) -> int:
    """Write all vectors of an embedding, whole or not at all; returns the bytes written."""
    if dtype not in DTYPES:
        raise UserError(f"A cache cannot be of type {dtype!r}: use {', '.join(DTYPES)}.")
    name, kept_as = DTYPES[dtype]
    shape = [embedding.num_embeddings, embedding.embedding_dim]
    table = {"dtype": name, "shape": shape, "data_offsets": [0, shape[0] * shape[1] * kept_as.itemsize]}
    metadata = {"format": FORMAT, "version": FORMAT_VERSION, "weights_sha256": weights_sha256(embedding)}
    done = checksum = 0

    def header() -> bytes:
        """As long with one checksum as with another."""
        sealed = sealed_metadata({"table": [str(kept_as), shape, checksum]}, metadata)
        text = json.dumps({"__metadata__": sealed, "table": table}).encode()
        return struct.pack("<Q", HEADER_BYTES) + text.ljust(HEADER_BYTES)

    with atomic_file(path) as file, in_evaluation(embedding, computing=True) as twin:
        file.write(header())
        for ids in id_chunks(embedding):
            vectors = twin(ids).to(kept_as)  # (chunk, m)
            raw = bytes_of_tensor(vectors.cpu().contiguous())
            checksum = crc32(raw, checksum)
            file.write(raw)
            done += len(ids)
            if progress:
                progress(done, shape[0])
        file.seek(0)
        file.write(header())
    return path.stat().st_size


def use_cache(path: Path, embedding: TokenEmbedding) -> None:
    """Let an embedding look its vectors up in what ``write_cache`` wrote, until it is trained again.

    A file that is missing, damaged, or made from other weights is refused.
    """
    write_again = "write it again with `torchdefine cache`"
    weights = weights_sha256(embedding)
    with reading_safetensors(
        path, if_missing="write it with `torchdefine cache` first", if_damaged=write_again
    ) as file:
        metadata = file.metadata
        if metadata.get("format") != FORMAT or metadata.get("version") != FORMAT_VERSION:
            raise UserError(f"{path} is not a cache of version {FORMAT_VERSION}: {write_again}.")
        if metadata.get("weights_sha256") != weights:
            raise UserError(f"{path} was made from other weights than the run's: {write_again}.")
        table = file.read()["table"]
    _look_up(embedding, nn.Embedding.from_pretrained(table))


def write_compressed(path: Path, embedding: TokenEmbedding, made: Compressed, facts: Mapping[str, Any]) -> None:
    """Write a packed table for the weights that an embedding has now."""
    made.table.save(path, {**facts, **made.to_dict(), "weights_sha256": weights_sha256(embedding)})


def use_compressed(path: Path, embedding: TokenEmbedding, facts: Mapping[str, Any]) -> None:
    """Let an embedding look its vectors up in a packed table, until it is trained again.

    A file that is missing, damaged, or made from other weights or for another vocabulary is refused.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: write it with `torchdefine compress` first.")
    _look_up(embedding, load_table(path, {**facts, "weights_sha256": weights_sha256(embedding)}))


def _look_up(embedding: TokenEmbedding, table: nn.Module) -> None:
    embedding.eval()
    embedding.look_up(table.to(next(embedding.map.parameters()).device))  # type: ignore[attr-defined]


def weights_sha256(embedding: TokenEmbedding) -> str:
    """A hash of all tensors that the vectors depend on; the settings of a run never change."""
    parts = {"map": embedding.map, "unit": embedding.unit, "features": embedding.features}
    modules = {part: module for part, module in parts.items() if isinstance(module, nn.Module)}
    tensors = {f"{part}.{name}": t for part, module in modules.items() for name, t in module.state_dict().items()}
    return sha256_of_tensors(tensors)
