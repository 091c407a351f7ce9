"""Inference by look-up: the finished vectors of a DeFINE embedding cached or packed, beside nn.Embedding."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.measuring import Contestant, Group, Prepared, Setting, milliseconds, share_of_time, times_as_long
from benchmarks.records import Benchmark
from benchmarks.texts import WIKIPEDIA_SIZE, real_text
from torchdefine import DeFINE
from torchdefine.tables import CompactTable, dense_table, svd_table, transform_table
from torchdefine.tables import bits as tables_of_bits
from torchdefine.tables.cache import use_cache, write_cache
from torchdefine.tables.codes import CodedRows
from torchdefine.tables.quantised import QuantisedRows
from torchdefine.tables.trellis import Runs, TrellisRows

TOKENS = 8960
WIDTH = 384
SMALL_SIZE = 20_000
FEW = 32
BITS_BYTES = 17
"""A row of the table ``bits``, about what ``compress`` allows it by default."""
ENCODER_SIZE = 30_522
ENCODER_TABLES = ("nn.Embedding", "bits", "int8", "int4")
NAMES = {8: "byte", 4: "4bit"}
_CODES = "compositional codes, 32 of 16"
GOALS: dict[int, dict[str, float]] = {
    FEW: {"bits": 0.15, "int4": 0.012, "int8": 0.012},
    TOKENS: {_CODES: 3, "bits": 10, "int4": 1, "int8": 1},
}
"""Milliseconds on a CPU."""


def looking_up(module: nn.Module, ids: torch.Tensor) -> Prepared:
    module.eval()
    stored = module.stored_bytes if isinstance(module, CompactTable) else _bytes(module)
    facts = {"stored MiB": round(stored / 2**20, 2)}
    return Prepared(lambda: module(ids), lambda: facts, torch.inference_mode)


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


class FusedRows(nn.Module):
    """Rows as fbgemm's kernels in torch take them: codes, step and offset of a row side by side."""

    def __init__(self, matrix: torch.Tensor, bits: int) -> None:
        super().__init__()
        self.of_rows = getattr(torch.ops.quantized, f"embedding_bag_{NAMES[bits]}_rowwise_offsets")
        self.rows = nn.Buffer(getattr(torch.ops.quantized, f"embedding_bag_{NAMES[bits]}_prepack")(matrix))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.of_rows(self.rows, ids.reshape(-1, 1))  # (T, m)
        return vectors.view(*ids.shape, -1)


def zipf_counts(size: int) -> torch.Tensor:
    return 1e8 / torch.arange(1, size + 1)


def quantised_at_random(size: int, bits: int) -> CompactTable:
    rows = QuantisedRows(size, WIDTH, bits)
    rows.codes.random_(256)
    rows.steps.uniform_(0.01, 0.02)
    return CompactTable(rows, torch.randn(WIDTH) / 100)


def bits_at_random(finished: torch.Tensor) -> CompactTable:
    """As many bits for every band and column as the vectors ask for; none of them are searched for."""
    counts = zipf_counts(len(finished))
    with patch.object(tables_of_bits, "trellis_rows", trellis_rows_at_random):
        return transform_table(finished, len(finished) * BITS_BYTES, counts=counts)


def trellis_rows_at_random(matrix: torch.Tensor, runs: Runs, memory: int) -> TrellisRows:
    made = TrellisRows(len(matrix), runs, memory).to(matrix.device)
    if not matrix.is_meta:
        made.codes.random_(256)
        made.scales.copy_(matrix[:1000].std(0, correction=0))
    return made


def tables(finished: torch.Tensor) -> dict[str, Callable[[], nn.Module]]:
    """Ways of holding the vectors of an embedding, each made once; what takes minutes to find is drawn at random."""
    size, device = len(finished), finished.device
    made: dict[str, Callable[[], nn.Module]] = {
        "nn.Embedding": lambda: nn.Embedding.from_pretrained(torch.empty_like(finished).normal_()),
        "float16": lambda: dense_table(finished, "float16"),
        "int8": lambda: quantised_at_random(size, 8),
        "int4": lambda: quantised_at_random(size, 4),
        _CODES: lambda: coded(size, 32, 16),
        "SVD of rank 128": lambda: svd_table(finished, 128),
        "SVD of rank 128, int8": lambda: svd_table(finished, 128, storage="int8"),
        "bits": lambda: bits_at_random(finished),
    }
    if device.type == "cpu":
        made |= {f"fbgemm's rows of {bits} bits": partial(FusedRows, finished, bits) for bits in NAMES}
    made |= {f"{name}, compiled": partial(_compiled, made[name]) for name in ("int8", "int4")}
    return {name: cache(make) for name, make in made.items()}


def _compiled(make: Callable[[], nn.Module]) -> nn.Module:
    return torch.compile(make())  # type: ignore[return-value]


def encoder_of(table: Callable[[], nn.Module], ids: torch.Tensor) -> Prepared:
    """A sentence encoder of MiniLM's size with random weights and another table."""
    from transformers import BertConfig, BertModel

    size = {"hidden_size": WIDTH, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 4 * WIDTH}
    encoder = BertModel(BertConfig(vocab_size=ENCODER_SIZE, **size)).eval()
    encoder.set_input_embeddings(table())
    return Prepared(lambda: encoder(ids), around=torch.inference_mode)


def finishing(embedding: DeFINE, chunk: int) -> Prepared:
    """All vectors, so many tokens at a time, as our own ``table()`` does with its chunk."""

    def work() -> torch.Tensor:
        parts = torch.arange(embedding.num_embeddings, device=next(embedding.parameters()).device).split(chunk)
        found = torch.empty(embedding.num_embeddings, WIDTH, device=parts[0].device)
        for part in parts:
            found[part[0] : part[-1] + 1] = embedding(part)
        return found

    return Prepared(embedding.table if not chunk else work, around=torch.inference_mode)


def lacks(name: str, setting: Setting) -> str:
    if "compiled" in name and setting.small:
        return "the small version leaves out what has to be compiled first"
    if "compiled" in name and not setting.on_gpu and not shutil.which(os.environ.get("CXX", "g++")):
        return "there is no C++ compiler"
    return ""


def look_ups(ids: torch.Tensor, ways: dict[str, Callable[[], nn.Module]], setting: Setting) -> Group:
    contestants = [
        Contestant(name, lambda make=make: looking_up(make().to(setting.device), ids), lacks(name, setting))  # type: ignore[misc]
        for name, make in ways.items()
    ]
    goals = [
        times_as_long(name, "nn.Embedding", bound, gpu_only=False)
        for name, bound in (("embedding.cached()", 1.05), ("a cache file", 1.05), ("embedding.cached()", 1.02))
        if name in ways
    ]
    if not (setting.on_gpu or setting.small):
        goals += [milliseconds(name, bound, gpu_only=False) for name, bound in GOALS[ids.numel()].items()]
    note = f"{ids.numel():,} tokens, {len(ids.unique()):,} distinct, {WIDTH} wide"
    return Group(f"look-up of {ids.numel():,} tokens", contestants, goals, note, taking_turns=True)


def encoders(ids: torch.Tensor, setting: Setting) -> Group:
    torch.manual_seed(2)
    ways = tables(torch.randn(ENCODER_SIZE, WIDTH, device=setting.device) @ decaying(setting.device))
    reason = "" if find_spec("transformers") else "transformers is not installed"
    contestants = [Contestant(name, partial(encoder_of, ways[name], ids), reason) for name in ENCODER_TABLES]
    goals = [share_of_time("bits", "nn.Embedding", 0.05, gpu_only=False)]
    return Group("an encoder's query of 8 tokens", contestants, goals, "six layers, 384 wide", taking_turns=True)


def decaying(device: torch.device) -> torch.Tensor:
    return torch.diag(torch.logspace(0, -1, WIDTH, device=device))


def groups(setting: Setting) -> Iterator[Group]:
    text, device = real_text(setting.data), setting.device
    size = SMALL_SIZE if setting.small else WIKIPEDIA_SIZE
    shape = (TOKENS // 140, 140)
    ids = text.ids(shape, device, size) if setting.small else text.wide_ids(shape, device, size)
    torch.manual_seed(1)
    with device:
        embedding = DeFINE(size, WIDTH, map_dim=128, expand_dim=1024, depth=3)
    embedding.requires_grad_(False).eval()
    ways = tables(embedding.table())
    yield look_ups(ids[0, :FEW], ways, setting)
    computed: dict[str, Callable[[], nn.Module]] = {
        "embedding.cached()": embedding.cached,
        "a cache file": lambda: from_cache_file(embedding),
    }
    yield look_ups(ids, {**ways, **computed, "computed by the unit": lambda: embedding}, setting)
    yield encoders(text.ids((1, 8), device, ENCODER_SIZE), setting)
    names = {"in chunks of 16,384": 16_384, "embedding.table()": 0, "in chunks of 1,024": 1024}
    contestants = [Contestant(name, partial(finishing, embedding, chunk)) for name, chunk in names.items()]
    goals = [] if setting.on_gpu or setting.small else [milliseconds("embedding.table()", 1000, gpu_only=False)]
    yield Group("all vectors", contestants, goals, f"{size:,} types, {WIDTH} wide", taking_turns=True)


BENCHMARK = Benchmark("look-up", "inference from cached and compact tables beside nn.Embedding", groups)
