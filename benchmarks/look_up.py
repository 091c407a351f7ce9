"""Inference by look-up: the finished vectors of a DeFINE embedding cached or packed, beside nn.Embedding."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.measuring import Contestant, Group, Prepared, Setting, times_as_long
from benchmarks.records import Benchmark
from benchmarks.texts import WIKIPEDIA_SIZE, real_text
from torchdefine import DeFINE
from torchdefine.tables import CompactTable, dense_table, quantised_table, svd_table
from torchdefine.tables.cache import use_cache, write_cache
from torchdefine.tables.codes import CodedRows

TOKENS = 8960
WIDTH = 384
SMALL_SIZE = 20_000


def looking_up(module: nn.Module, ids: torch.Tensor) -> Prepared:
    module.eval()

    @torch.inference_mode()
    def work() -> torch.Tensor:
        vectors: torch.Tensor = module(ids)
        return vectors

    stored = module.stored_bytes if isinstance(module, CompactTable) else _bytes(module)
    return Prepared(work, lambda: {"stored MiB": round(stored / 2**20, 2)})


def _bytes(module: nn.Module) -> int:
    tensors = [*module.parameters(), *(b for b in module.buffers() if b is not None)]
    return sum(t.numel() * t.element_size() for t in tensors)


def from_cache_file(embedding: DeFINE) -> DeFINE:
    """A copy that looks its vectors up in a cache file, as a run's embedding does."""
    embedding = copy.deepcopy(embedding)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        write_cache(path, embedding)
        use_cache(path, embedding)
    return embedding


def coded(size: int, codebooks: int, entries: int) -> CompactTable:
    """Codes drawn at random: looking them up takes as long as looking up good ones, and finding those takes longer."""
    codes = torch.randint(entries, (size, codebooks))
    return CompactTable(CodedRows.of(codes, torch.randn(codebooks, entries, WIDTH)))


def groups(setting: Setting) -> Iterator[Group]:
    text, device = real_text(setting.data), setting.device
    size = SMALL_SIZE if setting.small else WIKIPEDIA_SIZE
    shape = (TOKENS // 140, 140)
    ids = text.ids(shape, device, size) if setting.small else text.wide_ids(shape, device, size)
    torch.manual_seed(1)
    with device:
        embedding = DeFINE(size, WIDTH, map_dim=128, expand_dim=1024, depth=3)
    embedding.requires_grad_(False)
    finished = embedding.table()  # (V, m)
    packed: dict[str, Callable[[], nn.Module]] = {
        "nn.Embedding": lambda: nn.Embedding.from_pretrained(torch.empty_like(finished).normal_()),
        "embedding.cached()": embedding.cached,
        "a cache file": lambda: from_cache_file(embedding),
        "computed by the unit": lambda: embedding,
        "float16": lambda: dense_table(finished, "float16"),
        "int8": lambda: quantised_table(finished, 8),
        "int4": lambda: quantised_table(finished, 4),
        "compositional codes, 32 of 16": lambda: coded(size, 32, 16),
        "SVD of rank 128": lambda: svd_table(finished, 128),
    }
    contestants = [
        Contestant(name, lambda make=make: looking_up(make().to(device), ids))  # type: ignore[misc]
        for name, make in packed.items()
    ]
    goals = [
        times_as_long(name, "nn.Embedding", bound, gpu_only=False)
        for name, bound in (("embedding.cached()", 1.05), ("a cache file", 1.05), ("embedding.cached()", 1.02))
    ]
    yield Group(
        "look-up", contestants, goals, f"{ids.numel():,} tokens, {size:,} types, {WIDTH} wide", taking_turns=True
    )


BENCHMARK = Benchmark("look-up", "inference from cached and compact tables beside nn.Embedding", groups)
