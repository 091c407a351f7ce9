"""Rows of a table in few bytes: what every way of holding them has in common, floats, and bands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchdefine.config import Config, to_plain
from torchdefine.embedding.kept import Kept
from torchdefine.errors import UserError
from torchdefine.ops import only_values, product
from torchdefine.tables.fields import pack, packed_width, unpack

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROWS_AT_ONCE = 16_384
BLOCK = 128
"""Rows that are looked at together to find one's place in its band."""
_LARGEST_SHORT = 1 << 16
LARGEST_INT32 = 2**31 - 1
FEW = 2048
"""So many rows are decoded by operations on all bands at once; more of them band by band."""
_KINDS: dict[str, type[Rows]] = {}


class Rows(nn.Module, ABC):
    """``num_rows`` vectors of ``width`` numbers, packed; row numbers (…) → (…, width) of the dtype asked for.

    Float parts are parameters that do not learn until asked to (``requires_grad_``); codes are buffers. Both live in
    memory as they are stored. A subclass names its ``kind``, for files, and keeps the arguments of its constructor as
    attributes of the same names: plain values, or other rows.
    """

    kind: ClassVar[str]
    own_codes: int = 0
    """How many packed whole numbers there are; a code is a parameter as much as a float is."""
    together: Any = None
    """What decodes a few rows of bands of this kind by operations on all of them at once, if there is such a thing."""
    refuses: bool = False
    """Whether looking a row up that does not exist raises an error on the CPU, by itself."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS[cls.kind] = cls

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.num_rows, self.width = num_rows, width
        self._constants: defaultdict[torch.dtype, Kept] = defaultdict(Kept)
        self._is_zero = Kept()

    @abstractmethod
    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """(…) row numbers → (…, width)."""

    def added_to(self, base: Tensor, rows: Tensor) -> Tensor:
        """The rows plus a vector, (width,) and (…) → (…, width), where only values are asked for."""
        vectors = self.forward(rows, base.dtype)
        if not base.requires_grad and self._is_zero.of(lambda: not base.any(), base):
            return vectors
        return vectors.add_(base)

    def times(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """Rows multiplied by a matrix, (…) and (width, m) → (…, m)."""
        return product(self(rows, matrix.dtype), matrix)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All rows, (num_rows, width)."""
        return self(torch.arange(self.num_rows, device=next(self.parameters()).device), dtype)

    def kept_matrix(self, dtype: torch.dtype) -> Tensor:
        """All rows, to be read in every look-up."""
        if self._modules:
            return self.constant(lambda: self.matrix(dtype), dtype, *self.parameters(), *self.buffers())
        own: Any = (*self._parameters.values(), *self._buffers.values())  # nn.Module takes longer to name them
        return self.constant(lambda: self.matrix(dtype), dtype, *own)

    def constant(self, make: Callable[[], Tensor], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        """What ``make`` gives, of a dtype, from some of the tensors here; it is kept while these stay as they are."""
        if any(tensor.requires_grad for tensor in tensors) or not only_values(*tensors):
            return make()
        made: Tensor = self._constants[dtype].of(make, *tensors)
        return made

    def products(self, vectors: Tensor) -> Tensor:
        """Vectors (…, width) times every row: (…, num_rows), with few rows decoded at a time."""
        ids = torch.arange(self.num_rows, device=vectors.device)
        return torch.cat([vectors @ self(some, vectors.dtype).T for some in ids.split(ROWS_AT_ONCE)], dim=-1)

    def described(self) -> dict[str, Any]:
        """Kind and settings as plain values, for a file."""
        settings = {name: _plain(getattr(self, name)) for name in signature(type(self)).parameters}
        return {"encoding": self.kind, **settings}

    def extra_repr(self) -> str:
        return f"{self.num_rows:,} × {self.width}"


def _plain(value: Any) -> Any:
    if isinstance(value, nn.ModuleList):
        return [rows.described() for rows in value]  # type: ignore[operator]
    if isinstance(value, Config):
        return to_plain(value)
    return value.described() if isinstance(value, Rows) else value


def rows_from(described: Any) -> Any:
    """Rows without values from what ``described`` gave; whatever describes no rows stays as it is."""
    if isinstance(described, list):
        return [rows_from(one) for one in described]
    if not (isinstance(described, dict) and "encoding" in described):
        return described
    settings = {name: rows_from(value) for name, value in described.items()}
    kind = settings.pop("encoding")
    if kind not in _KINDS:
        raise UserError(f"The row encoding {kind!r} is unknown: this torchdefine knows {', '.join(sorted(_KINDS))}.")
    return _KINDS[kind](**settings)


def kinds_of_rows(names: Collection[str]) -> list[type[Rows]]:
    """The classes of rows of these kinds."""
    return [_KINDS[name] for name in sorted(names)]


def frozen(values: Tensor) -> nn.Parameter:
    """A parameter that does not learn until asked to."""
    return nn.Parameter(values, requires_grad=False)


def stored_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in the number type that a table holds them in; those too large or too small for it are refused."""
    stored = values.detach().to(dtype)
    if dtype != torch.float16 or stored.is_meta:
        return stored
    before, after = (float(torch.linalg.vector_norm(one.detach(), dtype=torch.float64)) for one in (values, stored))
    too_small = after < before / 2
    if too_small or not bool(torch.isfinite(stored).all()):
        size, way = ("small", "multiply") if too_small else ("large", "divide")
        problem = f"The table needs numbers as {size} as {float(values.abs().max()):.1e}, which float16 cannot hold"
        raise UserError(f"{problem}: {way} it by a number and undo that in its vectors, or store it as float32.")
    return stored


class DenseRows(Rows):
    """Rows as they are, in float32, float16 or bfloat16."""

    kind = "dense"
    refuses = True

    def __init__(self, num_rows: int, width: int, dtype: str = "float32") -> None:
        super().__init__(num_rows, width)
        if dtype not in FLOATS:
            raise UserError(f"The number type {dtype!r} is unknown: use one of {', '.join(FLOATS)}.")
        self.dtype = dtype
        self.weight = frozen(torch.zeros(num_rows, width, dtype=FLOATS[dtype]))

    @classmethod
    def of(cls, matrix: Tensor, dtype: str = "float32") -> DenseRows:
        made = cls(len(matrix), matrix.shape[1], dtype)
        made.weight = frozen(stored_as(matrix, FLOATS[dtype]).clone())
        return made

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.functional.embedding(rows, self.weight).to(dtype)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype)


class BandedRows(Rows):
    """Bands of rows one after another, most frequent first, and for each row the band that it is in.

    Each band is held in its own way: whole, in many bits, in few. It may be narrower than the table: its rows then end
    in zeros. Within a band rows are in the order of their numbers. With ``ranked`` False they are so in the whole
    table, and nothing is stored about it.
    """

    kind = "banded"

    def __init__(self, bands: list[Rows], ranked: bool = True) -> None:
        super().__init__(sum(band.num_rows for band in bands), max(band.width for band in bands))
        self.bands: Sequence[Any] = nn.ModuleList(bands)  # type: ignore[assignment]
        self.ranked, self.refuses = ranked, not ranked
        self._joined: tuple[Tensor, list[Tensor]] | None = None
        if ranked:
            blocks, self.band_bits = -(-self.num_rows // BLOCK), max((len(bands) - 1).bit_length(), 1)
            packed = packed_width(BLOCK, self.band_bits)
            self.band_of: Tensor = nn.Buffer(torch.zeros(blocks, packed, dtype=torch.uint8))
            short = torch.int16 if self.num_rows <= _LARGEST_SHORT else torch.int32  # read as unsigned
            self.first_places: Tensor = nn.Buffer(torch.zeros(blocks, len(bands), dtype=short))

    def rank(self, order: Tensor) -> None:
        """Note which rows the bands hold: row numbers, band after band, ascending in each."""
        sizes = torch.tensor([band.num_rows for band in self.bands], device=order.device)
        band = torch.empty_like(order)
        band[order] = torch.arange(len(sizes), device=order.device).repeat_interleave(sizes)
        spare = len(self.band_of) * BLOCK - len(order)
        blocks = nn.functional.pad(band, (0, spare), value=-1).view(-1, BLOCK)
        counts = torch.stack([(blocks == one).sum(-1) for one in range(len(sizes))], -1)  # (blocks, bands)
        self.first_places = (counts.cumsum(0) - counts + sizes.cumsum(0) - sizes).to(self.first_places.dtype)
        self.band_of = pack(blocks.clamp(min=0), self.band_bits)

    def places(self, rows: Tensor) -> Tensor:
        """Where rows stand when the bands are one after another: those of its band before its block, and in it."""
        block, at = rows // BLOCK, (rows % BLOCK).unsqueeze(-1)
        bands = unpack(torch.embedding(self.band_of, block), self.band_bits, BLOCK)  # (…, BLOCK)
        own = bands.gather(-1, at)
        before = (bands == own) & (torch.arange(BLOCK, device=rows.device) < at)
        first = torch.embedding(self.first_places, block).gather(-1, own.long()).squeeze(-1).long()
        first = first & (_LARGEST_SHORT - 1) if self.first_places.dtype is torch.int16 else first
        return first + before.sum(-1)

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        place = self.places(rows) if self.ranked else rows
        if rows.device.type == "cpu" and not torch.compiler.is_compiling():
            return self._each_its_own(place, dtype, None)
        return self._all_and_pick(place, dtype)

    def products(self, vectors: Tensor) -> Tensor:
        """Band by band, each with no more columns than it has; then in the order of the rows' numbers."""
        parts = [band.products(vectors[..., : band.width]) for band in self.bands]
        if not self.ranked:
            return torch.cat(parts, dim=-1)
        bands = unpack(self.band_of, self.band_bits, BLOCK).flatten()[: self.num_rows]
        return torch.cat(parts, dim=-1)[..., bands.argsort(stable=True).argsort()]

    def times(self, rows: Tensor, matrix: Tensor) -> Tensor:
        if not (rows.is_cpu and only_values(rows, matrix)):
            return super().times(rows, matrix)
        place = self._kept_places(rows) if self.ranked else rows
        few = self._few(place, matrix.dtype)
        return self._each_its_own(place, matrix.dtype, matrix) if few is None else product(few, matrix)

    def _kept_places(self, rows: Tensor) -> Tensor:
        """The same, from those of all rows, which are kept: finding one takes longer than decoding its row."""

        def found() -> Tensor:
            chunks = torch.arange(self.num_rows, device=rows.device).split(ROWS_AT_ONCE)
            return torch.cat([self.places(chunk).int() for chunk in chunks])

        places = self.constant(found, torch.int32, self.band_of, self.first_places)
        return places.index_select(0, rows.reshape(-1)).view(rows.shape).long()

    def _few(self, place: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The rows, (…) → (…, width), where they are few and all bands can be decoded together."""
        if place.numel() > FEW:
            return None
        floats: list[Tensor] = []
        for band in self.bands:
            if band.together is None or any(one.requires_grad for one in band._parameters.values()):
                return None
            floats += band._parameters.values()
        flat = self._joined_codes()
        if flat.numel() > LARGEST_INT32:
            return None
        few = self._constants[dtype].of(lambda: self.bands[0].together(self.bands, flat, dtype), flat, *floats)
        rows: Tensor = few.decoded(place.reshape(-1).contiguous())
        return rows.view(*place.shape, self.width)

    def _joined_codes(self) -> Tensor:
        """The codes of all bands, one after another in memory; each band from then on has its part of this."""
        codes = [band._buffers["codes"] for band in self.bands]
        if self._joined is None or any(now is not part for now, part in zip(codes, self._joined[1], strict=True)):
            with torch.inference_mode(False):
                flat = torch.cat([band.codes.flatten() for band in self.bands])
                parts = flat.split([band.codes.numel() for band in self.bands])
                for band, part in zip(self.bands, parts, strict=True):
                    band.codes = part.view(band.codes.shape)
            self._joined = flat, [band.codes for band in self.bands]
        return self._joined[0]

    def _each_its_own(self, place: Tensor, dtype: torch.dtype, matrix: Tensor | None) -> Tensor:
        """Every band decodes only its own rows, each once: least work, but shapes that depend on the ids.

        The rows are multiplied by ``matrix``, if there is one.
        """
        distinct, back = torch.unique(place, return_inverse=True)  # in order, so a band's rows are side by side
        edges = torch.tensor([0, *accumulate(band.num_rows for band in self.bands)])
        found = torch.searchsorted(distinct, edges).tolist()
        if found[-1] - found[0] < len(distinct):
            raise IndexError(f"a row is outside the {self.num_rows} of {len(self.bands)} bands")
        parts = []
        for band, start, (first, last) in zip(self.bands, edges.tolist(), pairwise(found), strict=False):
            if first < last:
                own = band(distinct[first:last] - start, dtype)
                wide = self._widened(own) if matrix is None else product(own, matrix[: band.width])
                parts.append(wide.to(dtype))  # autocast may have changed it
        width = self.width if matrix is None else matrix.shape[1]
        vectors = torch.cat(parts) if parts else torch.zeros(0, width, dtype=dtype)
        return torch.embedding(vectors, back)

    def _all_and_pick(self, place: Tensor, dtype: torch.dtype) -> Tensor:
        """Every band decodes for all, and a mask picks: fixed shapes, as compiled and exported programs need."""
        vectors: Tensor | None = None
        start = 0
        for band in self.bands:
            own = self._widened(band((place - start).clamp(0, band.num_rows - 1), dtype))  # (…, width)
            vectors = own if vectors is None else torch.where((place >= start).unsqueeze(-1), own, vectors)
            start += band.num_rows
        assert vectors is not None
        return vectors

    def _widened(self, vectors: Tensor) -> Tensor:
        return nn.functional.pad(vectors, (0, self.width - vectors.shape[-1]))


def in_order(order: Tensor) -> bool:
    """Whether row numbers are in the order of the ids."""
    return torch.equal(order, torch.arange(len(order), device=order.device))


def sorted_within(order: Tensor, sizes: list[int]) -> Tensor:
    """Row numbers of bands one after another, ascending in each."""
    return torch.cat([part.sort().values for part in order.split(sizes)])


def in_bands(bands: list[Rows], order: Tensor) -> BandedRows:
    """Bands whose rows stand in ``order``, row numbers ascending in each; nothing is stored if they are in all."""
    made = BandedRows(bands, ranked=not in_order(order)).to(order.device)
    if made.ranked:
        made.rank(order)
    return made
