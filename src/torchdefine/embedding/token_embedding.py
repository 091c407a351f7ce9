"""Ids → vectors through a map and a unit: what DeFINE and its baselines have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.embedding.adaptive_map import AdaptiveMap
from torchdefine.embedding.features import FEATURE_PARTS, Feature, Features, previous_ids
from torchdefine.embedding.group_linear import GroupLinear
from torchdefine.embedding.host_map import HostMap
from torchdefine.embedding.kept import Kept
from torchdefine.embedding.map import MapLayer, ProjectiveMap, StandardMap, as_ids
from torchdefine.embedding.slim_map import SlimMap
from torchdefine.embedding.table import LooksUp, finished_table, in_evaluation, tensors_of, through_unit
from torchdefine.embedding.unit import DefineUnit, DenseMLP, DenseProjection, ExpansionLayer
from torchdefine.errors import UserError
from torchdefine.modes import Prepared, untouched
from torchdefine.ops import locked_dropout

MAPS: dict[str, Any] = {kind.kind: kind for kind in (StandardMap, ProjectiveMap, AdaptiveMap, SlimMap)}
"""Our maps by the kind that a saved embedding names."""
PARTS = (
    *(*MAPS.values(), HostMap, nn.Embedding, nn.Linear, DenseProjection, DenseMLP),
    *(DefineUnit, ExpansionLayer, GroupLinear, nn.LayerNorm, nn.GroupNorm, Features, Feature, *FEATURE_PARTS),
)
"""What our maps and units are made of: each handles every token independently."""

PART_NAMES = {"define": "unit", "context": "context model", "input_output": "input and output tables", "total": "total"}
"""The parts of a model, by which parameters are counted."""

IDS_TO_MEASURE = 4096
FEWEST_IDS = 64
MOST_DIFFERENT = 0.75
"""If a larger fraction of the ids is different, finding them costs more than it saves."""


class TokenEmbedding(LooksUp, Prepared):
    """A map layer, then a unit from its vectors to the finished ones; (…) → (…, embedding_dim).

    ``unit`` is any module from (…, map_layer.output_dim) to (…, embedding_dim), or None to take the map's vectors as
    they are. ``features`` are what tokens share beside the map. ``row_dropout`` is the dropout rate of whole rows,
    token types whose map vectors are zeroed in a step. ``map_dropout`` is that of single features of the map's vectors:
    one mask for all positions of (B, T) ids, else one for each vector. Both act where ids are looked up; an output
    layer that is tied to the finished vectors compares with all of them, whole.
    """

    beside_dim = 0
    """How many numbers at the end of each vector are not the model's input, but meant for its layers."""
    shares = False
    """Whether ``embedded`` may compute every different token of a batch once."""

    def __init__(
        self,
        map_layer: MapLayer,
        unit: nn.Module | None = None,
        embedding_dim: int | None = None,
        features: Features | None = None,
    ) -> None:
        super().__init__()
        self.map: MapLayer = map_layer
        self.unit = unit
        self.features = features
        self.embedding_dim = map_layer.output_dim if embedding_dim is None else embedding_dim
        self.row_dropout = self.map_dropout = 0.0
        self._vector_dtype = torch.float32
        self._kept = Kept()

    @classmethod
    def beside(cls, map_layer: MapLayer, partner: TokenEmbedding) -> TokenEmbedding:
        """An embedding with its own map and the unit of ``partner``, which alone trains, saves and moves that unit."""
        embedding = TokenEmbedding(map_layer, None, partner.embedding_dim)
        object.__setattr__(embedding, "unit", partner.unit)  # around nn.Module, which would register it a second time
        return embedding

    @property
    def num_embeddings(self) -> int:
        return self.map.num_embeddings

    @property
    def read_dim(self) -> int:
        """The width of a model's input."""
        return self.embedding_dim - self.beside_dim

    @property
    def map_dim(self) -> int:
        return self.map.map_dim

    @property
    def padding_idx(self) -> int | None:
        return self.map.padding_idx

    @property
    def has_table(self) -> bool:
        """Whether every token has one vector, but for what may be added behind the unit."""
        return self.features is None or not self.features.through_unit

    @property
    def reads_previous(self) -> bool:
        """Whether a vector depends on the token before, too, which ``forward`` must then be given."""
        return self.features is not None and self.features.of_pairs

    def forward(self, ids: Tensor, each_once: bool = False, previous: Tensor | None = None) -> Tensor:
        """(…) whole numbers → (…, embedding_dim); with ``each_once`` no id may stand twice.

        ``previous`` are the tokens before each, (…), -1 for none, where an embedding ``reads_previous``; with
        ``each_once``, what is added for pairs of tokens is left out.
        """
        shared = self.features
        if shared is not None and not each_once:
            previous = shared.checked(previous)
        if self.looked_up is not None and not self.has_other_weights():
            vectors = self._looked_up(ids, self.looked_up)
            return vectors if shared is None else shared.with_pairs(vectors, ids, previous)
        vectors = self.map(ids, each_once) if each_once else self.map(ids)  # type: ignore[call-arg]
        if shared is not None:
            vectors = shared.before_unit(vectors, ids, previous)
        if self.training and self.row_dropout:  # 1 / (1 - p) for the types kept in this step and 0 for the others
            types = torch.ones(self.num_embeddings, device=vectors.device, dtype=vectors.dtype)
            vectors = vectors * F.dropout(types, self.row_dropout)[ids.long()].unsqueeze(-1)
        if self.training and self.map_dropout:
            locked = vectors.ndim == 3
            vectors = locked_dropout(vectors, self.map_dropout, 1) if locked else F.dropout(vectors, self.map_dropout)
        finished: Tensor = vectors if self.unit is None else self.unit(vectors)  # (…, m)
        if self.unit is not None and (padding := self.map.padding_idx) is not None:
            finished = finished.masked_fill((ids == padding).unsqueeze(-1), 0.0)  # its biases would give it a vector
        if shared is not None:
            finished = shared.with_pairs(shared.behind_unit(finished, ids), ids, previous)
        return finished

    def finished(self) -> Tensor:
        """All finished vectors, (V, m), for an output layer that is tied to them; it compares with ``read_dim`` of m.

        Where they are to learn they are computed with gradients, in training with dropout in the unit, a mask for each
        row. Otherwise they are looked up, or computed once and kept until the weights change.
        """
        table = None if self.looked_up is None or self.has_other_weights() else self.looked_up
        cached = None if table is None else self.cached_vectors
        if cached is not None and cached.dtype == self._vector_dtype:
            return cached
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self._weights())
        if torch.compiler.is_compiling() or self.training or (learns and table is None):
            return self._all_computed() if table is None else self._looked_up(self._ids(), table)
        kept: Tensor = self._kept.of(
            lambda: finished_table(self), *tensors_of(self.map, self.unit, self.features, table)
        )
        return kept

    def _ids(self) -> Tensor:
        return torch.arange(self.num_embeddings, device=next(self._weights()).device)

    def _all_computed(self) -> Tensor:
        ids = self._ids()
        once = isinstance(self.map, StandardMap | AdaptiveMap)  # then a GPU adds up gradients without sorting ids
        mapped: Tensor = self.map(ids, once) if once else self.map(ids)  # type: ignore[call-arg]  # (V, n)
        shared = None if self.features is None else self.features.of_tokens_alone()
        if shared is not None:
            mapped = shared.before_unit(mapped, ids, None)
        finished = mapped if self.unit is None else through_unit(self.unit, mapped)  # (V, m)
        if (padding := self.map.padding_idx) is not None:
            finished = finished.masked_fill((ids == padding).unsqueeze(-1), 0.0)
        return finished if shared is None else shared.behind_unit(finished, ids)

    def _weights(self) -> Iterator[Tensor]:
        parts = (part for part in (self.map, self.unit, self.features) if isinstance(part, nn.Module))
        return itertools.chain.from_iterable(part.parameters() for part in parts)

    def prepare(self, on: bool = True) -> None:
        """Decide whether a batch's tokens may be computed in another order, and equal ones once.

        Only where a vector depends on nothing else in the batch: not with maps, units and hooks of somebody else, and
        not where dropout draws anew for every place.
        """
        if self.training:  # an evaluation has ended, and recorded steps change weights behind torch's back
            self._kept = Kept()
        unit, forward = self.unit, type(self).forward
        within = unit.config.dropout if isinstance(unit, DefineUnit) else 0.0
        drops = self.training and max(self.map_dropout, within) > 0
        ours = unit is None or (type(unit) in PARTS and untouched(unit, *PARTS))
        self.fused = on and ours and not drops and forward is TokenEmbedding.forward and untouched(self, *PARTS)
        # Without a unit or features, only several projected tables cost more than finding equal tokens.
        pays = unit is not None or self.features is not None or isinstance(self.map, AdaptiveMap)
        self.shares = self.fused and pays and self.has_table

    def _looked_up(self, ids: Tensor, table: nn.Module) -> Tensor:
        """As short as possible: on a GPU the look-up itself takes less time than a few lines of Python."""
        if type(ids) is not Tensor or not ids.is_cuda or ids.dtype is not torch.int64:
            ids = as_ids(ids, self.num_embeddings)
        vectors: Tensor = F.embedding(ids, table.weight) if type(table) is nn.Embedding else table(ids)
        return vectors if vectors.dtype is self._vector_dtype else vectors.to(self._vector_dtype)

    def look_up(self, table: Tensor | nn.Module | None) -> None:
        if table is not None and self.features is not None:
            self.features.of_tokens_alone()  # refuses pairs that go through the unit
        super().look_up(table)
        self._kept = Kept()
        weights = itertools.chain(self.map.parameters(), self.map.buffers())  # type: ignore[attr-defined]
        dtypes = (weight.dtype for weight in weights if weight.is_floating_point())
        self._vector_dtype = next(dtypes, torch.float32)  # a foreign map may have no weights

    def stand_alone(self) -> None:
        if self.features is not None:
            self.features = self.features.of_tokens_alone()

    def extra_repr(self) -> str:
        own = sum(parameter.numel() for parameter in self.parameters())
        plain = self.num_embeddings * self.embedding_dim
        return f"{self.num_embeddings:,} → {self.embedding_dim}: {own:,} parameters, nn.Embedding would have {plain:,}"

    def reset_parameters(self) -> None:
        self.look_up(None)
        self.map.reset_parameters()
        if self.features is not None:
            self.features.reset_parameters()
        if self.unit is not None:
            reset = getattr(self.unit, "reset_parameters", None)
            if reset is None:
                raise UserError(f"The unit {type(self.unit).__name__} has no method reset_parameters: add one.")
            reset()

    def table(
        self,
        *,
        dtype: torch.dtype | None = None,
        computing: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """All finished vectors, (V, m), a chunk of tokens at a time; ``computing`` where it looks them up, too.

        Bigrams that are added behind the unit are left out, as they depend on another token, too.
        """
        return finished_table(self, dtype=dtype, computing=computing, progress=progress)

    def cached(self, *, dtype: torch.dtype | None = None) -> nn.Embedding:
        """An ``nn.Embedding`` that gives the same vectors without the unit, for inference."""
        if self.reads_previous:
            raise UserError(
                "An nn.Embedding cannot add bigrams: call look_up(table()), which caches what depends on the token "
                "alone."
            )
        return nn.Embedding.from_pretrained(self.table(dtype=dtype), padding_idx=self.padding_idx)

    def resize(self, num_embeddings: int) -> Self:
        """Change the vocabulary in place: old rows stay bit for bit, new ones start like the others did.

        The table becomes a new parameter, so give it to the optimiser again.
        """
        self.map.resize(num_embeddings)
        if self.features is not None:
            self.features.resize(num_embeddings)
        self.look_up(None)
        return self


def embedded(
    embedding: TokenEmbedding, ids: Tensor, distinct: int | None = None, previous: Tensor | None = None
) -> Tensor:
    """The vectors of ids; an embedding that ``shares`` computes every different token once, if that pays.

    ``distinct`` is an upper bound on the number of different ids. Without it only a CPU finds them, since the host
    would have to wait for a GPU.
    """
    if embedding.unit is None or distinct is None:
        pays = ids.device.type == "cpu"
    else:
        pays = distinct <= MOST_DIFFERENT * ids.numel()
    shares = embedding.shares and embedding.looked_up is None and not torch.compiler.is_compiling()
    if not (shares and pays and ids.numel() >= FEWEST_IDS):
        return embedding(ids) if previous is None else embedding(ids, previous=previous)
    types, places = distinct_ids(ids, distinct)
    if previous is None or embedding.features is None:
        return F.embedding(places, embedding(types, each_once=True))
    alone = F.embedding(places, embedding(types, each_once=True))
    return embedding.features.with_pairs(alone, ids, embedding.features.checked(previous))


class SizesRead(NamedTuple):
    """Root mean squares of an embedding's vectors."""

    unit: float | None
    """Of what the unit reads, where there is one."""
    model: float


@torch.no_grad()
def sizes_read(embedding: TokenEmbedding) -> SizesRead:
    """How large the vectors are that the unit and the model read, over some tokens."""
    count = min(embedding.num_embeddings, IDS_TO_MEASURE)
    ids = torch.arange(count, device=next(embedding.parameters()).device) * embedding.num_embeddings // count
    with in_evaluation(embedding, alone=False) as twin:
        previous = previous_ids(ids) if twin.reads_previous else None
        read = twin.map(ids)
        if twin.features is not None:
            read = twin.features.before_unit(read, ids, previous)
        both = read, twin(ids, previous=previous) if twin.reads_previous else twin(ids)
        mapped, finished = (float(vectors.float().square().mean().sqrt()) for vectors in both)
    return SizesRead(None if embedding.unit is None else mapped, finished)


def distinct_ids(ids: Tensor, room: int | None) -> tuple[Tensor, Tensor]:
    """The different ids in rising order, (room,), and where each id is among them: ``distinct[places] == ids``.

    Without ``room`` there are as many as are found, and the host has to wait for a GPU to count them. With it, shapes
    are fixed and spare places repeat id 0; it must not be smaller than the number of different ids. Ids are below 2³¹.
    """
    if room is None:
        return torch.unique(ids, return_inverse=True)
    ordered, order = ids.reshape(-1).int().sort()  # a GPU sorts byte by byte: four of them, not eight
    ranks = F.pad((ordered[1:] != ordered[:-1]).long(), (1, 0)).cumsum(0)  # (N,)
    places = torch.empty_like(ordered).scatter_(0, order, ranks.int())
    distinct = ordered.new_zeros(room).scatter_(0, ranks, ordered)
    return distinct.to(ids.dtype), places.view(ids.shape)


def count_distinct(ids: np.ndarray, num_embeddings: int) -> int:
    """How many different non-negative ids there are, on the host; marking them is faster than sorting."""
    seen = np.zeros(num_embeddings, dtype=bool)
    seen[ids[ids >= 0]] = True
    return int(np.count_nonzero(seen))


def distinct_hint(embedding: TokenEmbedding, ids: np.ndarray, others: int) -> int | None:
    """The bound that ``embedded`` takes, from ids on the host and how many ``others`` there may be; None for none."""
    if not embedding.shares or embedding.unit is None:  # then only a CPU shares, and counts by itself
        return None
    return count_distinct(ids, embedding.num_embeddings) + others


def count_parameters(model: nn.Module, embeddings: Iterable[TokenEmbedding], context: nn.Module) -> dict[str, int]:
    """The parameters of a model's units, of its context model, and of all else; shared ones count once."""
    units = {p for embedding in embeddings if embedding.unit is not None for p in embedding.unit.parameters()}
    define, within = sum(p.numel() for p in units), sum(p.numel() for p in context.parameters())
    total = sum(p.numel() for p in model.parameters())
    return {"define": define, "context": within, "input_output": total - define - within, "total": total}
