"""DeFINE: Map · Expand · Reduce as one module that stands wherever an ``nn.Embedding`` did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from torchdefine.embedding.adaptive_map import AdaptiveMap
from torchdefine.embedding.map import MapLayer, ProjectiveMap, StandardMap
from torchdefine.embedding.plan import make_plan
from torchdefine.embedding.table import cached_embedding, finished_table
from torchdefine.embedding.unit import DefineUnit, UnitOptions
from torchdefine.errors import UserError
from torchdefine.files import read_json, write_json, write_safetensors

FORMAT = "torchdefine embedding"
FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE = "embedding.json", "embedding.safetensors"


class DeFINE(nn.Module):
    """Token ids → vectors through a small table and a deep group-linear unit; (…) → (…, embedding_dim).

    Args:
        num_embeddings: size of the vocabulary, V.
        embedding_dim: width of the finished vectors, m.
        map_dim: width of the table, n: the only part that grows with the vocabulary.
        expand_dim: widest layer of the unit, k.
        depth: layers of the unit, N, the last of which reduces to ``embedding_dim``.
        max_groups: groups of the first layer, g_max; by default what lets the halving end at 1, at most 16.
        padding_idx: a token whose vector is always zero and never learns.
        unit: a variant by name ("define", "hgt", "glt" …) or ``UnitOptions`` with norm, activation, dropout, rules.

    ``DeFINE.over(map_layer, …)`` puts the unit behind another map: projective, or adaptive by frequency.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        map_dim: int = 128,
        expand_dim: int = 1024,
        depth: int = 3,
        max_groups: int | None = None,
        padding_idx: int | None = None,
        unit: UnitOptions | str = "define",
    ) -> None:
        super().__init__()
        options = UnitOptions.of(unit) if isinstance(unit, str) else unit
        plan = make_plan(map_dim, expand_dim, embedding_dim, depth, max_groups, options.rules)
        self._assemble(StandardMap(num_embeddings, map_dim, padding_idx), DefineUnit(plan, options))

    @classmethod
    def over(
        cls,
        map_layer: MapLayer,
        embedding_dim: int,
        expand_dim: int = 1024,
        depth: int = 3,
        max_groups: int | None = None,
        unit: UnitOptions | str = "define",
    ) -> Self:
        """The unit behind any map layer; its input is as wide as what the map gives."""
        options = UnitOptions.of(unit) if isinstance(unit, str) else unit
        plan = make_plan(map_layer.output_dim, expand_dim, embedding_dim, depth, max_groups, options.rules)
        embedding = cls.__new__(cls)
        nn.Module.__init__(embedding)
        embedding._assemble(map_layer, DefineUnit(plan, options))
        return embedding

    def _assemble(self, map_layer: MapLayer, unit: DefineUnit) -> None:
        self.map: MapLayer = map_layer
        self.unit = unit

    @property
    def num_embeddings(self) -> int:
        return self.map.num_embeddings

    @property
    def embedding_dim(self) -> int:
        return self.unit.plan.embedding_dim

    @property
    def map_dim(self) -> int:
        return self.map.map_dim

    @property
    def padding_idx(self) -> int | None:
        return self.map.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """(…) whole numbers → (…, embedding_dim)."""
        small = self.map(ids)  # (…, n)
        finished: Tensor = self.unit(small)  # (…, m)
        if self.padding_idx is not None:  # the unit's biases would give the padding token a vector
            finished = finished.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
        return finished

    def reset_parameters(self) -> None:
        self.map.reset_parameters()
        self.unit.reset_parameters()

    def table(self, *, dtype: torch.dtype | None = None, progress: Callable[[int, int], None] | None = None) -> Tensor:
        """All finished vectors, (V, m), computed a chunk of tokens at a time."""
        return finished_table(self, dtype=dtype, progress=progress)

    def cached(self, *, dtype: torch.dtype | None = None) -> nn.Embedding:
        """An ``nn.Embedding`` that gives the same vectors without the unit, for inference."""
        return cached_embedding(self, dtype=dtype)

    def resize(self, num_embeddings: int) -> Self:
        """Change the vocabulary in place: old rows stay bit for bit, new ones start like the others did.

        The table becomes a new parameter, so give it to the optimiser again.
        """
        self.map.resize(num_embeddings)
        return self

    def to_config(self) -> dict[str, Any]:
        """What ``from_config`` needs to build the same module with fresh weights; plain values only."""
        plan = self.unit.plan
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "map": self.map.to_config(),
            "embedding_dim": plan.embedding_dim,
            "expand_dim": plan.expand_dim,
            "depth": plan.depth,
            "max_groups": plan.max_groups,
            "unit": self.unit.options.to_dict(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        if config.get("format") != FORMAT or config.get("version") != FORMAT_VERSION:
            raise UserError(
                f"This is no {FORMAT} of version {FORMAT_VERSION} but {config.get('format')!r}, version "
                f"{config.get('version')!r}: save it again with a matching torchdefine."
            )
        sizes = {name: config[name] for name in ("embedding_dim", "expand_dim", "depth", "max_groups")}
        return cls.over(map_from_config(config["map"]), **sizes, unit=UnitOptions.of(**config["unit"]))

    def save(self, folder: str | Path) -> None:
        """Write settings and weights into a folder, each file whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / WEIGHTS_FILE, self.state_dict())
        write_json(folder / CONFIG_FILE, self.to_config())

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what ``save`` wrote; the weights are checked against the settings."""
        folder = Path(folder)
        embedding = cls.from_config(read_json(folder / CONFIG_FILE))
        weights = folder / WEIGHTS_FILE
        try:
            state = load_file(weights)
            embedding.to(state["unit.last.weight"].dtype)
            embedding.load_state_dict(state)
        except FileNotFoundError:
            raise UserError(f"{folder} has no {WEIGHTS_FILE}: save the embedding there again.") from None
        except (SafetensorError, RuntimeError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise UserError(f"{weights} cannot be read ({reason}): save the embedding again.") from error
        return embedding


def map_from_config(config: dict[str, Any]) -> MapLayer:
    """Build a map layer from what its ``to_config`` gave; weights are drawn anew."""
    settings = dict(config)
    kind = settings.pop("kind", None)
    if kind == "standard":
        return StandardMap(**settings)
    if kind == "projective":
        return ProjectiveMap(**settings)
    if kind == "adaptive":
        return AdaptiveMap.from_config(settings)
    raise UserError(f"The map {kind!r} is unknown: use standard, projective or adaptive.")
