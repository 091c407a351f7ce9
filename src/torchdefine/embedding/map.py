"""Map: ids → small vectors. Here and in adaptive_map.py live the only vocabulary-sized tables of a model.

Every map layer says how wide its table is (``map_dim``) and how wide the vectors are that it gives (``output_dim``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from torchdefine.config import MOST_WIDE, Config, rate, setting
from torchdefine.embedding.few_bits import MOST_BITS, rounded
from torchdefine.errors import UserError, check_count

Scale = Literal["none", "root-dim", "unit-rms"] | float


@dataclass(frozen=True)
class VocabularyFacts:
    """What modules need to know of the vocabulary."""

    size: int
    counts: Sequence[int] | np.ndarray | None = None
    """One for each id where ids are not in frequency order, so that bands can go by frequency."""
    token: Callable[[int], str] | None = None
    """The string of each id, for features that read it."""

    def counts_tensor(self) -> Tensor | None:
        return None if self.counts is None else torch.as_tensor(self.counts, device="cpu")


@dataclass(frozen=True)
class MapConfig(Config):
    """What every map has; a map of your own inherits it and says how it is built."""

    kind: str = ""
    map_dim: int = setting(128, "Width of the table, the paper's n.", at_least=1, at_most=MOST_WIDE)
    scale: Scale = setting(
        "none",
        "Factor on the map's vectors. root-dim: the square root of their width. unit-rms: the factor with which they "
        "have a root mean square of 1 before training.",
        above=0,
    )
    init_std: float | None = setting(
        None, "Standard deviation of the initial table; by default 1 / sqrt(map_dim).", above=0
    )
    row_dropout: float = rate("Dropout rate of whole rows: in a step, all vectors of a dropped token are zero.")
    map_dropout: float = rate(
        "Dropout rate of the map's vectors before the unit, with one mask for all positions of a text, as in DeLighT."
    )

    features: tuple[str, ...] = setting(
        (),
        "Extra tables whose rows tokens share, as NAME:ROWSxWIDTH:PLACE. Names: bigrams, characters, frequency. "
        "Places: add (the default) and concat are before the unit, after is behind it. Example: bigrams:8192x16:after.",
    )

    @abstractmethod
    def build(self, vocabulary: VocabularyFacts, width: int | None) -> MapLayer:
        """The map; ``width`` is that of the vectors that the unit gives, if it says."""
        raise NotImplementedError

    def factor(self, width: int) -> float:
        """What the map's vectors, ``width`` wide, are multiplied by."""
        if self.scale == "none":
            return 1.0
        if self.scale == "root-dim":
            return float(width**0.5)
        return 1 / self.initial_rms if self.scale == "unit-rms" else float(self.scale)

    @property
    def initial_rms(self) -> float:
        """The root mean square of fresh vectors before they are multiplied."""
        return self.std

    @property
    def std(self) -> float:
        return self.map_dim**-0.5 if self.init_std is None else self.init_std


def few_bits() -> Any:
    """A field for the bits that a table is trained in."""
    explanation = "Bits of every number of the table, which is trained with rounding. By default, numbers are floats."
    return setting(None, explanation, at_least=1, at_most=MOST_BITS)


@dataclass(frozen=True)
class StandardConfig(MapConfig):
    """One table."""

    kind: str = "standard"
    bits: int | None = few_bits()

    def build(self, vocabulary: VocabularyFacts, width: int | None) -> StandardMap:
        return StandardMap(vocabulary.size, self.map_dim, scale=self.factor(self.map_dim), bits=self.bits)


@dataclass(frozen=True)
class ProjectiveConfig(MapConfig):
    """One table and a projection."""

    kind: str = "projective"
    output_dim: int | None = setting(
        None, "Width of the vectors; by default the unit's embedding_dim, or map_dim.", at_least=1, at_most=MOST_WIDE
    )
    projection_std: float | None = setting(
        None, "Standard deviation of the initial projection; by default 1 / sqrt(map_dim).", above=0
    )
    bits: int | None = few_bits()

    @property
    def initial_rms(self) -> float:
        return self.std * (self.projection_std or self.map_dim**-0.5) * self.map_dim**0.5

    def build(self, vocabulary: VocabularyFacts, width: int | None) -> ProjectiveMap:
        output_dim = self.output_dim or width or self.map_dim
        scale = self.factor(output_dim)
        layer = ProjectiveMap(vocabulary.size, self.map_dim, output_dim, scale=scale, bits=self.bits)
        layer.projection_std = self.projection_std or layer.projection_std
        return layer


class MapLayer(Protocol):
    """What an embedding or an output layer needs of a map."""

    num_embeddings: int
    map_dim: int
    output_dim: int
    padding_idx: int | None

    def __call__(self, ids: Tensor) -> Tensor: ...

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw all weights anew, with another standard deviation or the one that they were drawn with before."""

    def resize(self, num_embeddings: int) -> None: ...

    def to_config(self) -> dict[str, Any]: ...


def as_ids(ids: Tensor, num_embeddings: int) -> Tensor:
    """Ids of any whole-number type, checked, in a type that torch can look up."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"Ids are a tensor of whole numbers, not {type(ids).__name__}: use torch.tensor(…).")
    ids = widened_ids(ids)
    check_ids(ids, num_embeddings)
    return ids


def widened_ids(ids: Tensor) -> Tensor:
    """Ids of a small whole-number type as int64: torch would take them for masks, and -100 for one of them."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype in (torch.bool, torch.int32, torch.int64):
        return ids
    return ids.long()


def check_ids(ids: Tensor, num_embeddings: int) -> None:
    """Refuse ids of the wrong type, and on the CPU those out of range; a GPU is never made to wait for a check."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"Ids are whole numbers, but these are {ids.dtype}: pass ids.long().")
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
        return
    if torch._C._functorch.is_batchedtensor(ids):  # under vmap no number can be looked at
        return
    low, high = torch.aminmax(ids)
    lowest, highest = int(low), int(high)
    if lowest < 0 or highest >= num_embeddings:
        wrong = lowest if lowest < 0 else highest
        raise UserError(
            f"The id {wrong} is outside the vocabulary: ids run from 0 to {num_embeddings - 1}; fix the data"
            + (f", or resize the embedding to at least {highest + 1}." if lowest >= 0 else ".")
        )


def check_table(num_embeddings: int, map_dim: int, padding_idx: int | None) -> int | None:
    """Check the sizes of a table; returns the padding row counted from the front, as nn.Embedding does."""
    check_count("num_embeddings", num_embeddings)
    check_count("map_dim", map_dim)
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise TypeError(f"padding_idx must be a whole number or None, not {padding_idx!r}.")
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise UserError(f"padding_idx {padding_idx} is outside the {num_embeddings} rows: try 0.")
    return padding_idx % num_embeddings


def rows_of(table: nn.Embedding, ids: Tensor, each_once: bool) -> Tensor:
    """(…) → (…, n).

    ``each_once``: of equal ids only one gets a gradient, and the padding row none; a GPU then adds gradients without
    sorting ids first.
    """
    if each_once and ids.is_cuda and not table.sparse:
        return table.weight.index_select(0, ids.reshape(-1)).view(*ids.shape, table.embedding_dim)
    return table(ids.int() if ids.is_cuda else ids)  # backward sorts them, byte by byte: fewer bytes


class StandardMap(nn.Module):
    """One table of V × n; with ``scale`` its vectors are multiplied on the way out.

    With ``bits`` its numbers are rounded wherever they are read, with a step for each row, and learn through that.
    """

    kind = "standard"
    saved: tuple[str, ...] = ("num_embeddings", "map_dim", "padding_idx", "scale", "sparse", "bits", "std")
    """What ``to_config`` keeps."""

    def __init__(
        self,
        num_embeddings: int,
        map_dim: int,
        padding_idx: int | None = None,
        scale: float = 1.0,
        sparse: bool = False,
        bits: int | None = None,
    ) -> None:
        super().__init__()
        self.padding_idx = check_table(num_embeddings, map_dim, padding_idx)
        if bits is not None and bits not in range(1, MOST_BITS + 1):
            raise UserError(f"A table cannot be trained in {bits} bits: use 1 to {MOST_BITS}, or None for floats.")
        self.num_embeddings, self.map_dim, self.output_dim = num_embeddings, map_dim, map_dim
        self.scale, self.bits, self.std = scale, bits, 1.0
        self.table = nn.Embedding(num_embeddings, map_dim, self.padding_idx, sparse=sparse)

    @property
    def sparse(self) -> bool:
        """Whether the table's gradient is a sparse tensor, which has only the rows that a batch uses."""
        return self.table.sparse

    @sparse.setter
    def sparse(self, sparse: bool) -> None:
        self.table.sparse = sparse

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw the table anew with standard deviation ``std``, by default the one that it had before."""
        self.std = std = self.std if std is None else std
        nn.init.normal_(self.table.weight, std=std)
        if self.padding_idx is not None:
            nn.init.zeros_(self.table.weight[self.padding_idx])

    def forward(self, ids: Tensor, each_once: bool = False) -> Tensor:
        vectors = rows_of(self.table, as_ids(ids, self.num_embeddings), each_once)  # (…, n)
        vectors = vectors * self.scale if self.scale != 1.0 else vectors
        return vectors if self.bits is None else rounded(vectors, self.bits)

    def compared(self) -> Tensor:
        """The rows that a tied output layer compares with, (V, n)."""
        if self.bits is None:
            return self.table.weight
        return rounded(self.table.weight * self.scale, self.bits) / self.scale

    def resize(self, num_embeddings: int) -> None:
        check_resize(num_embeddings, self.padding_idx)
        self.table = resized_table(self.table, num_embeddings, self.std)
        self.num_embeddings = num_embeddings

    def to_config(self) -> dict[str, Any]:
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.saved}}

    def extra_repr(self) -> str:
        shown = {"scale": None if self.scale == 1.0 else f"{self.scale:g}", "bits": self.bits}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


class ProjectiveMap(StandardMap):
    """One table of V × n and one linear projection, without bias, to ``output_dim``."""

    kind = "projective"
    saved = (*StandardMap.saved, "output_dim", "projection_std")

    def __init__(
        self,
        num_embeddings: int,
        map_dim: int,
        output_dim: int,
        padding_idx: int | None = None,
        scale: float = 1.0,
        sparse: bool = False,
        bits: int | None = None,
    ) -> None:
        super().__init__(num_embeddings, map_dim, padding_idx, scale, sparse, bits)
        check_count("output_dim", output_dim)
        self.output_dim, self.projection_std = output_dim, map_dim**-0.5
        self.projection = nn.Linear(map_dim, output_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        super().reset_parameters(std)
        nn.init.normal_(self.projection.weight, std=self.projection_std)

    def forward(self, ids: Tensor, each_once: bool = False) -> Tensor:
        rows = rows_of(self.table, as_ids(ids, self.num_embeddings), each_once)  # (…, n)
        vectors = self.projection(rows if self.bits is None else rounded(rows, self.bits))  # (…, output_dim)
        return vectors * self.scale if self.scale != 1.0 else vectors

    def compared(self) -> Tensor:
        return self.table.weight if self.bits is None else rounded(self.table.weight, self.bits)

    def factors_of(self, table: Tensor) -> dict[str, Tensor]:
        """The weights with which this map gives the best low rank of a table, (V, output_dim), that was trained."""
        left, sizes, right = torch.linalg.svd(table.double(), full_matrices=False)
        roots, kept = sizes[: self.map_dim].sqrt(), slice(self.map_dim)
        factors = {"table.weight": left[:, kept] * roots, "projection.weight": right[kept].T * roots}
        return {name: factor.to(table.dtype) for name, factor in factors.items()}


def resized_table(table: nn.Embedding, num_embeddings: int, std: float) -> nn.Embedding:
    """A table with more or fewer rows: old rows are kept bit for bit, new ones drawn like the others."""
    old, width = table.weight, table.embedding_dim
    kept = min(num_embeddings, table.num_embeddings)
    weight = old.detach().new_empty(num_embeddings, width)
    weight[:kept] = old.detach()[:kept]
    weight[kept:].normal_(std=std)
    new = nn.Embedding(num_embeddings, width, table.padding_idx, sparse=table.sparse, _weight=weight)
    new.weight.requires_grad_(old.requires_grad)
    return new


def check_resize(num_embeddings: int, padding_idx: int | None) -> None:
    check_table(num_embeddings, 1, None)
    if padding_idx is not None and padding_idx >= num_embeddings:
        raise UserError(f"{num_embeddings} rows would lose padding row {padding_idx}: keep at least {padding_idx + 1}.")
