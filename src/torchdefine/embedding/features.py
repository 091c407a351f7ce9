"""What tokens share with others beside a row of their own: n-grams of characters, frequency, the token before.

A feature is written as one text: ``bigrams:16384x16`` is a table of 16,384 rows of 16 numbers for hashed pairs of the
previous token and this one. ``characters`` are hashed n-grams of the token's own string, ``frequency`` a table by
frequency rank. A third field says where it joins the vector: ``add`` (through a matrix that starts at zero, before the
unit), ``concat`` (beside the map's vector, before the unit) or ``after`` (through such a matrix, behind the unit).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from torchdefine.config import MOST, MOST_WIDE
from torchdefine.embedding.adaptive_map import frequency_ranks
from torchdefine.embedding.map import VocabularyFacts, widened_ids
from torchdefine.errors import UserError

NO_TOKEN = -1
"""Stands before the first token of a text."""
LENGTHS = (3, 4, 5)
"""Of the n-grams of characters."""
MOST_NGRAMS = 32
"""Of a token: all of those of twelve characters."""
PRIME = (1 << 31) - 1
FACTORS = 1_103_515_245, 1_597_334_677, 741_103_597
Place = Literal["add", "concat", "after"]
PATTERN = re.compile(r"(?P<name>[a-z]+):(?P<rows>\d{1,10})x(?P<width>\d{1,7})(:(?P<place>add|concat|after))?")


@dataclass(frozen=True)
class FeatureConfig:
    """One feature, read from its text."""

    name: str
    rows: int
    width: int
    place: Place

    @classmethod
    def of(cls, text: str) -> FeatureConfig:
        found = PATTERN.fullmatch(text.replace(" ", ""))
        if found is None or found["name"] not in FEATURES:
            raise UserError(
                f"The feature {text!r} is unknown: write one of {', '.join(FEATURES)} with rows and width, as in "
                "bigrams:16384x16, and maybe a place: add, concat or after."
            )
        rows, width = int(found["rows"]), int(found["width"])
        if not (2 <= rows <= MOST and 1 <= width <= MOST_WIDE):
            raise UserError(f"The feature {text!r} needs at least 2 rows and a width from 1 to {MOST_WIDE:,}.")
        return cls(found["name"], rows, width, cast(Place, found["place"] or "add"))

    @property
    def of_pairs(self) -> bool:
        """Whether it depends on the token before, too."""
        return FEATURES[self.name] is Bigrams

    @property
    def pairs_through_unit(self) -> bool:
        """Whether it makes a unit, if there is one, compute every position."""
        return self.of_pairs and self.place != "after"


def concatenated_width(features: Sequence[str]) -> int:
    """By how much features make the unit's input wider than the map's vectors."""
    return sum(one.width for one in map(FeatureConfig.of, features) if one.place == "concat")


def previous_ids(ids: Tensor, before: Tensor | None = None) -> Tensor:
    """(…, T) → (…, T): the token before each, with ``before``, (…, 1), at the start; by default there is none."""
    ids = widened_ids(ids)
    first = torch.full_like(ids[..., :1], NO_TOKEN) if before is None else before.to(ids.dtype)
    return torch.cat((first, ids[..., :-1]), dim=-1)


class Bigrams(nn.Module):
    """Rows for hashed pairs of the token before and this one."""

    def __init__(self, config: FeatureConfig, vocabulary: VocabularyFacts) -> None:
        super().__init__()
        self.table = nn.Embedding(config.rows, config.width)

    def forward(self, ids: Tensor, previous: Tensor) -> Tensor:
        return cast(Tensor, self.table(hashed_pairs(previous, ids, self.table.num_embeddings)))  # (…, width)

    def resize(self, num_embeddings: int) -> None:
        """Pairs of new tokens have rows already."""


class Characters(nn.Module):
    """Sums of rows for hashed n-grams of a token's string, begun by < and ended by >, over the root of their number.

    Strings come with the vocabulary; without them, as where weights are about to be loaded, no token has n-grams.
    """

    ngrams: Tensor

    def __init__(self, config: FeatureConfig, vocabulary: VocabularyFacts) -> None:
        super().__init__()
        self.table = nn.Embedding(config.rows, config.width, padding_idx=0)  # row 0: no n-gram
        found = torch.zeros(vocabulary.size, MOST_NGRAMS, dtype=torch.int32)
        if vocabulary.token is not None and not found.is_meta:
            hashed = [ngrams_of(vocabulary.token(index), config.rows) for index in range(vocabulary.size)]
            found.copy_(torch.tensor([row + [0] * (MOST_NGRAMS - len(row)) for row in hashed]))
        self.register_buffer("ngrams", found)

    def forward(self, ids: Tensor, previous: Tensor | None = None) -> Tensor:
        ngrams = self.ngrams[ids.long()]  # (…, MOST_NGRAMS)
        number = (ngrams > 0).sum(-1, keepdim=True).clamp(min=1).to(self.table.weight.dtype)
        return cast(Tensor, self.table(ngrams).sum(-2) * number.rsqrt())  # (…, width)

    def resize(self, num_embeddings: int) -> None:
        """New tokens have no n-grams: their strings are not known."""
        kept = self.ngrams[:num_embeddings]
        self.ngrams = torch.cat((kept, kept.new_zeros(num_embeddings - len(kept), MOST_NGRAMS)))


class Frequency(nn.Module):
    """Rows for ranges of frequency ranks, each as long on a logarithmic scale."""

    ranges: Tensor

    def __init__(self, config: FeatureConfig, vocabulary: VocabularyFacts) -> None:
        super().__init__()
        self.table = nn.Embedding(config.rows, config.width)
        ranks = frequency_ranks(vocabulary.size, vocabulary.counts_tensor())
        ranks = torch.arange(vocabulary.size) if ranks is None else ranks
        found = (ranks.double() + 1).log() * (config.rows / math.log(vocabulary.size + 1))
        self.register_buffer("ranges", found.to(torch.int32).clamp(max=config.rows - 1))

    def forward(self, ids: Tensor, previous: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.table(self.ranges[ids.long()]))  # (…, width)

    def resize(self, num_embeddings: int) -> None:
        """New tokens are the rarest."""
        kept = self.ranges[:num_embeddings]
        rarest = kept.new_full((num_embeddings - len(kept),), self.table.num_embeddings - 1)
        self.ranges = torch.cat((kept, rarest))


FEATURES: dict[str, Any] = {"bigrams": Bigrams, "characters": Characters, "frequency": Frequency}
FEATURE_PARTS = (*FEATURES.values(), nn.Embedding, nn.Linear)


class Feature(nn.Module):
    """One feature and what brings it to the width of the vectors that it joins."""

    def __init__(self, config: FeatureConfig, vocabulary: VocabularyFacts, width: int) -> None:
        super().__init__()
        self.place, self.of_pairs = config.place, config.of_pairs
        self.rows: Any = FEATURES[config.name](config, vocabulary)
        self.lift = None if config.place == "concat" else nn.Linear(config.width, width, bias=False)

    def reset_parameters(self, std: float) -> None:
        """A matrix starts at zero: the model begins as it would without the feature."""
        table = self.rows.table
        nn.init.normal_(table.weight, std=std if self.lift is None else 1.0)
        if table.padding_idx is not None:
            nn.init.zeros_(table.weight[table.padding_idx])
        if self.lift is not None:
            nn.init.zeros_(self.lift.weight)

    def forward(self, ids: Tensor, previous: Tensor | None, padding_idx: int | None) -> Tensor:
        found: Tensor = self.rows(ids, previous)
        found = found if self.lift is None else self.lift(found)
        return found if padding_idx is None else found.masked_fill((ids == padding_idx).unsqueeze(-1), 0.0)


class Features(nn.Module):
    """What is added to the vectors of tokens, or stands beside them, before a unit and behind it.

    ``map_dim`` is the width of the map's vectors, ``embedding_dim`` that of the finished ones. Without a unit, what
    would join them before it is added behind.
    """

    def __init__(
        self,
        features: Sequence[str],
        vocabulary: VocabularyFacts,
        map_dim: int,
        embedding_dim: int,
        has_unit: bool = True,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.texts, self.padding_idx, self.std = tuple(features), padding_idx, 1.0
        configs = [FeatureConfig.of(text) for text in features]
        if not has_unit:
            configs = [replace(config, place="after") for config in configs]
        self.parts: Any = nn.ModuleList(
            Feature(config, vocabulary, embedding_dim if config.place == "after" else map_dim) for config in configs
        )
        self.reset_parameters()

    def _parts(self, of_pairs: bool, *places: Place) -> Iterator[Feature]:
        return (part for part in self.parts if part.of_pairs is of_pairs and part.place in places)

    @property
    def of_pairs(self) -> bool:
        """Whether a vector depends on the token before, too."""
        return any(part.of_pairs for part in self.parts)

    @property
    def through_unit(self) -> bool:
        """Whether pairs of tokens go through the unit, which must then compute every position."""
        return any(self._parts(True, "add", "concat"))

    @property
    def sparse(self) -> bool:
        """Whether the gradients of the tables are sparse tensors."""
        return all(table.sparse for table in self._tables())

    @sparse.setter
    def sparse(self, sparse: bool) -> None:
        for table in self._tables():
            table.sparse = sparse

    def _tables(self) -> Iterator[nn.Embedding]:
        return (module for module in self.modules() if isinstance(module, nn.Embedding))

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw all anew; ``std`` is the size of what stands beside the map's vectors."""
        self.std = std = self.std if std is None else std
        for part in self.parts:
            part.reset_parameters(std)

    def resize(self, num_embeddings: int) -> None:
        for part in self.parts:
            part.rows.resize(num_embeddings)

    def before_unit(self, vectors: Tensor, ids: Tensor, previous: Tensor | None) -> Tensor:
        """The map's vectors, (…, map_dim), with what joins them before the unit."""
        for part in (*self._parts(False, "add"), *self._parts(True, "add")):
            vectors = vectors + part(ids, previous, self.padding_idx)
        besides = (*self._parts(False, "concat"), *self._parts(True, "concat"))
        beside = [part(ids, previous, self.padding_idx) for part in besides]
        return torch.cat((vectors, *beside), dim=-1) if beside else vectors

    def behind_unit(self, vectors: Tensor, ids: Tensor) -> Tensor:
        """Finished vectors, (…, embedding_dim), with what depends on the token alone."""
        for part in self._parts(False, "after"):
            vectors = vectors + part(ids, None, self.padding_idx)
        return vectors

    def with_pairs(self, vectors: Tensor, ids: Tensor, previous: Tensor | None) -> Tensor:
        """Finished vectors, computed or looked up, with what depends on the token before, where that is given."""
        for part in self._parts(True, "after") if previous is not None else ():
            vectors = vectors + part(ids, previous, self.padding_idx)
        return vectors

    def checked(self, previous: Tensor | None) -> Tensor | None:
        """The tokens before, where they are needed; padding is none."""
        if not self.of_pairs:
            return None
        if previous is None:
            raise UserError(
                "Bigrams need the token before each: call embedding(ids, previous=previous_ids(ids)), and carry the "
                "last token from one segment of a text to the next."
            )
        if self.padding_idx is None:
            return previous
        return previous.masked_fill(previous == self.padding_idx, NO_TOKEN)

    def of_tokens_alone(self) -> Features | None:
        """The same without pairs; refused where these go through the unit."""
        if self.through_unit:
            raise UserError(
                "Bigrams go through the unit, so no token has one vector that could be cached, packed or compared "
                "with: add them behind the unit, as in bigrams:16384x16:after."
            )
        alone = Features.__new__(Features)
        alone.__dict__ = {**self.__dict__, "_modules": dict(self._modules)}
        alone.parts = nn.ModuleList(self._parts(False, "add", "concat", "after"))
        return alone

    def extra_repr(self) -> str:
        return ", ".join(self.texts)


def hashed_pairs(previous: Tensor, ids: Tensor, rows: int) -> Tensor:
    """A row for every pair, by whole numbers below 2⁶³ that every device and format computes alike."""
    first, second, third = FACTORS
    mixed = ((previous.long() + 2) * first + ids.long() * second + third) % PRIME
    return mixed * (mixed + third) % PRIME % rows


def ngrams_of(token: str, rows: int) -> list[int]:
    """The rows of a token's n-grams, from 1; of longer tokens the first ones."""
    marked = f"<{token}>"
    found = [marked[i : i + n] for n in LENGTHS for i in range(len(marked) - n + 1)]
    return [crc32(ngram.encode("utf-8", "surrogatepass")) % (rows - 1) + 1 for ngram in found[:MOST_NGRAMS]]


def strings_of(tokens: Sequence[str] | None, features: Sequence[str], number: int) -> Callable[[int], str] | None:
    """The tokens' strings as a vocabulary gives them, checked against the features that read them."""
    if tokens is None:
        for text in features:
            if FEATURES[FeatureConfig.of(text).name] is Characters:
                raise UserError(f"The feature {text} reads the tokens' strings: give them as tokens, one for each id.")
        return None
    if len(tokens) != number:
        raise UserError(f"There are {len(tokens):,} tokens for {number:,} rows: give one string for each id.")
    return tokens.__getitem__


def check_features(features: Sequence[str], model: str, *, pairs: bool) -> None:
    """Refuse, before any work, features that are unknown, or that a kind of model does not give what they need."""
    for text in features:
        if FeatureConfig.of(text).of_pairs and not pairs:
            raise UserError(
                f"The feature {text} needs the token before each, which {model} does not give its embedding: leave it "
                "out."
            )
