"""The modules that take the places of a table: an ``nn.Embedding``, others that share it, and tied output layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.adapt.matrix import Matrix
from torchdefine.embedding import DeFINEBag, LooksUp, ProjectiveMap, StandardMap, TokenEmbedding, finished_table
from torchdefine.embedding.table import TOKENS_AT_ONCE
from torchdefine.errors import UserError
from torchdefine.output.full import resized_bias
from torchdefine.tables import CompactTable, DenseRows
from torchdefine.tables.rows import BandedRows

LAYOUT_VERSION = 1

HeadKind = Literal["map", "vectors", "own"]
"""What an output layer is tied to: the map's table through a projection, the vectors, or nothing."""


class Face(nn.Embedding):
    """What a model sees where its ``nn.Embedding`` was: the vectors of a ``StandIn``, times this place's ``scale``."""

    stand_in: Any
    scale: float
    max_norm, norm_type, scale_grad_by_freq = None, 2.0, False
    _is_hf_initialized = True  # transformers draws no weights for it

    def __init__(self) -> None:
        nn.Module.__init__(self)  # it has no matrix of its own

    @property
    def num_embeddings(self) -> int:  # type: ignore[override]
        return int(self.stand_in.table.num_embeddings)

    @property
    def embedding_dim(self) -> int:  # type: ignore[override]
        return int(self.stand_in.table.embedding_dim)

    @property
    def padding_idx(self) -> int | None:  # type: ignore[override]
        """That of the replaced table, whose row need not be zero: what PEFT adds does not learn there."""
        found: int | None = self.stand_in.old_padding_idx
        return found

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        return bool(getattr(getattr(self.stand_in.table, "map", None), "sparse", False))

    @property
    def embed_scale(self) -> float:
        """PEFT multiplies what it adds by it."""
        return self.scale

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unscaled vectors, (V, m), for code that reads an embedding's matrix.

        On the meta device, where transformers compares sizes with a file's, it is what files have under this name.
        """
        marker: Tensor = self.stand_in.marker
        return marker if marker.is_meta else _readable(self.stand_in, self.stand_in.rows)

    def compute(self, given: Tensor) -> Tensor:
        """The vectors of ids, (…) → (…, m)."""
        vectors: Tensor = self.stand_in.vectors(given)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def extra_repr(self) -> str:
        scale = "" if self.scale == 1.0 else f", scale={self.scale:g}"
        cached = "" if self.stand_in.looked_up is None else ", cached"
        return f"{self.num_embeddings:,}, {self.embedding_dim}{scale}{cached}"

    def cached(self, *, dtype: torch.dtype | None = None) -> nn.Embedding:
        """An ``nn.Embedding`` of its own with the same answers, the scale included; this module stays as it is."""
        vectors: Tensor = self.stand_in.all_vectors()
        scaled = (vectors if self.scale == 1.0 else vectors * self.scale).to(dtype or vectors.dtype)
        return nn.Embedding.from_pretrained(scaled, freeze=True, padding_idx=self.padding_idx)


class StandIn(LooksUp, Face):
    """Ids → the vectors of ``table``, times ``scale``; (…) → (…, embedding_dim), with the face of an ``nn.Embedding``.

    ``table`` is a ``TokenEmbedding`` (DeFINE and its baselines) or a ``CompactTable``. What is stored as ``weight``
    is one number, the version of this layout. It has the dtype and device of the vectors. Files hold it under the name
    of the replaced table, so that a program that expects the old table meets a wrong shape and stops, instead of going
    on with random numbers. ``heads`` says what an output layer that shared the old table gets.
    """

    def __init__(self, table: nn.Module, old: nn.Embedding, scale: float = 1.0, heads: HeadKind = "own") -> None:
        super().__init__()
        self.table = table
        self.scale, self.heads, self.old_padding_idx = scale, heads, old.padding_idx
        like = old.weight
        self._buffers["weight"] = torch.full((1,), LAYOUT_VERSION, dtype=like.dtype, device=like.device)

    @property
    def stand_in(self) -> StandIn:
        return self

    @property
    def marker(self) -> Tensor:
        """What is stored as ``weight``."""
        marker = self._buffers["weight"]
        assert marker is not None
        return marker

    def forward(self, given: Tensor, borrower: Borrower | None = None) -> Any:
        """The vectors of ids; or what a borrower computes, in a tuple, so that no hook takes it for vectors."""
        return self.compute(given) if borrower is None else (borrower.compute(given),)

    def vectors(self, ids: Tensor) -> Tensor:
        """(…) → (…, m), unscaled."""
        looks_up = self.looked_up is not None and not self.has_other_weights()
        found: Tensor = (self.looked_up if looks_up else self.table)(ids)  # type: ignore[misc]
        return found.to(self.marker.dtype)

    def all_vectors(self) -> Tensor:
        """(V, m), unscaled, computed a part of the vocabulary at a time."""
        return finished_table(self.table, dtype=self.marker.dtype, device=self.marker.device)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The vectors of a range of ids, unscaled: (stop - start, m)."""
        stop = self.num_embeddings if stop is None else stop
        if self.cached_vectors is not None:
            return self.cached_vectors[start:stop].to(self.marker.dtype)
        return self.vectors(torch.arange(start, stop, device=self.marker.device))

    def cache(self) -> Self:
        """Look up cached vectors, V × m numbers in memory, from now on until ``train()``, a resize or a load."""
        self.look_up(self.all_vectors())
        return self

    @torch.no_grad()
    def resize(self, num_embeddings: int, *, from_mean: bool = False) -> None:
        """Change the vocabulary in place: old rows stay, new ones are drawn like the others or start at their mean."""
        self.look_up(None)
        old = self.num_embeddings
        if isinstance(self.table, CompactTable):
            if num_embeddings < old:
                raise UserError(f"A compact table cannot lose rows: keep {old}, or resize the model before the fit.")
            if num_embeddings > old:
                self.table = _grown(self.table, num_embeddings - old, from_mean)
            return
        assert isinstance(self.table, TokenEmbedding)
        self.table.resize(num_embeddings)
        if from_mean and num_embeddings > old and isinstance(self.table.map, StandardMap | ProjectiveMap):
            weight = self.table.map.table.weight
            weight[old:] = weight[:old].mean(0)


def _grown(table: CompactTable, added: int, from_mean: bool) -> CompactTable:
    """The same table with rows added, uncompressed, after its own."""
    start = torch.zeros(table.embedding_dim, device=table.mean.device)
    if from_mean:
        start = finished_table(table, dtype=torch.float32).mean(0) - table.mean
    rows = DenseRows.of(start.expand(added, -1)).to(table.mean.device)
    rows.requires_grad_(any(parameter.requires_grad for parameter in table.rows.parameters()))
    grown = CompactTable(BandedRows([table.rows, rows], ranked=False), table.mean, table.padding_idx)
    grown.mean = table.mean  # keeps its dtype and requires_grad
    return grown.train(table.training)


def _readable(source: StandIn, values: Callable[[], Tensor]) -> Tensor:
    """The (V, m) values of a matrix that is not stored; a compiler follows them at once."""
    if torch.compiler.is_compiling():
        return values()
    return Matrix.of((source.num_embeddings, source.embedding_dim), source.marker, values)


class Borrower(nn.Module):
    """Uses a ``StandIn`` that stands elsewhere, and is trained and saved there."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self._stand_in = (stand_in,)  # in a tuple, so that the shared table is not registered a second time

    @property
    def stand_in(self) -> StandIn:
        return self._stand_in[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of this module alone borrows from the same stand-in."""
        if not memo:
            memo[id(self.stand_in)] = self.stand_in
        memo[id(self)] = copied = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def compute(self, given: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, given: Tensor) -> Tensor:
        """Where the stand-in is a unit of FSDP of its own, it is called, since its hooks gather its parameters."""
        result: Tensor = self.stand_in(given, self)[0] if hasattr(self.stand_in, "unshard") else self.compute(given)
        return result


class SharedStandIn(Borrower, Face):
    """Another place where the same table is looked up."""

    compute = Face.compute

    def __init__(self, stand_in: StandIn, scale: float = 1.0) -> None:
        super().__init__(stand_in)
        self.scale = scale


class TiedHead(Borrower):
    """Hidden vectors → logits, (…, in_features) → (…, V), like the ``nn.Linear`` that it replaces.

    It owns its bias but no table; ``stand_in`` trains and saves that.
    """

    def __init__(self, stand_in: StandIn, bias: nn.Parameter | None) -> None:
        super().__init__(stand_in)
        self.bias = bias

    @property
    def in_features(self) -> int:
        return self.stand_in.embedding_dim

    @property
    def out_features(self) -> int:
        return self.stand_in.num_embeddings

    @property
    def weight(self) -> Tensor:
        """The output matrix, (V, m), for code that reads it."""
        return _readable(self.stand_in, self.matrix)

    def matrix(self) -> Tensor:
        raise NotImplementedError

    def follow_resize(self) -> None:
        """Give the bias the table's new size; new tokens start at zero."""
        if self.bias is not None and len(self.bias) != self.out_features:  # else a model may share it
            self.bias = resized_bias(self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features:,}, bias={self.bias is not None}"


class MapHead(TiedHead):
    """Tied to the map's table, V × n, through a projection of its own from the hidden width to n.

    This is the paper's tie: the output layer is as small as the map, and shares its numbers.
    """

    def __init__(self, stand_in: StandIn, bias: nn.Parameter | None, *, fresh: bool = False) -> None:
        super().__init__(stand_in, bias)
        like, map_dim = stand_in.marker, self._map().map_dim
        self.projection = nn.Linear(self.in_features, map_dim, bias=False, dtype=like.dtype, device=like.device)
        if fresh:  # the projected vectors then are as large as the hidden ones
            nn.init.normal_(self.projection.weight, std=self.in_features**-0.5)

    def _map(self) -> StandardMap | ProjectiveMap:
        table = self.stand_in.table
        own = table.map if isinstance(table, TokenEmbedding) else table
        if not isinstance(own, StandardMap | ProjectiveMap):
            raise UserError(f"The output layer cannot be tied to the map of a {type(own).__name__}: use heads='untie'.")
        return own

    def matrix(self) -> Tensor:
        return self._map().table.weight @ self.projection.weight  # (V, n) (n, m)

    def compute(self, given: Tensor) -> Tensor:
        return F.linear(self.projection(given), self._map().table.weight, self.bias)


class VectorsHead(TiedHead):
    """Tied to the finished vectors, as the old head was to the old table.

    The vectors are computed again, part of the vocabulary at a time, unless the stand-in is cached. A compact table
    makes logits without them.
    """

    def matrix(self) -> Tensor:
        return self.stand_in.rows()

    def compute(self, given: Tensor) -> Tensor:
        total, table = self.out_features, self.stand_in.table
        if torch.is_grad_enabled() and self.stand_in.looked_up is None and isinstance(table, TokenEmbedding):
            logits = [given @ table.finished().T.to(given.dtype)]  # backward computes a unit's layers again
        elif self.stand_in.looked_up is None and isinstance(table, CompactTable):
            logits = [table.logits(given)]
        else:
            logits = [
                given @ self.stand_in.rows(start, min(start + TOKENS_AT_ONCE, total)).T.to(given.dtype)
                for start in range(0, total, TOKENS_AT_ONCE)
            ]
        whole = logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)  # (…, V)
        return whole if self.bias is None else whole + self.bias


def cache_tables(model: nn.Module) -> list[str]:
    """Compute all vectors of every replaced table once and look them up from then on; returns the tables' names.

    For inference: it lasts until ``model.train()`` or ``load_state_dict``, and is never saved. It takes the memory of
    the old tables again, but saves the time of the units.
    """
    stand_ins = {name: module for name, module in model.named_modules() if isinstance(module, StandIn | DeFINEBag)}
    if not stand_ins:
        raise UserError("The model has no replaced table to cache: replace its embeddings first.")
    for stand_in in stand_ins.values():
        stand_in.eval()
        stand_in.cache()
    return list(stand_ins)
