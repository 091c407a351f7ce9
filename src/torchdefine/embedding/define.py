"""DeFINE: Map · Expand · Reduce as one module that can replace an ``nn.Embedding`` anywhere."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchdefine import __version__
from torchdefine.config import to_plain
from torchdefine.embedding.features import Features, concatenated_width, strings_of
from torchdefine.embedding.hub import Hub
from torchdefine.embedding.map import MapConfig, MapLayer, StandardMap, VocabularyFacts
from torchdefine.embedding.token_embedding import MAPS, TokenEmbedding
from torchdefine.embedding.unit import DefineUnit
from torchdefine.embedding.unit_plan import Plan, UnitConfig, default_expand_dim, default_map_dim, make_plan
from torchdefine.errors import UserError
from torchdefine.files import read_json as read_json_file
from torchdefine.files import read_sealed, write_sealed
from torchdefine.plain import read_json
from torchdefine.sealed_tensors import reading_safetensors, write_safetensors

FORMAT = "torchdefine embedding"
FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE = "embedding.json", "embedding.safetensors"
SAVE_AGAIN = "save the embedding there again"


class DeFINE(Hub, TokenEmbedding):
    """Token ids → vectors through a small table and a deep group-linear unit; (…) → (…, embedding_dim).

    Args:
        num_embeddings: size of the vocabulary, V.
        embedding_dim: width of the vectors, m.
        map_dim: width of the table, n: the only part that grows with the vocabulary. By default a quarter of m, at most
            128.
        expand_dim: widest layer of the unit, k. The unit does not shrink with V, so use a small k for a small V. By
            default four times m, at most 1024.
        padding_idx: a token whose vector is always zero and never learns.
        unit: a variant by name ("define", "hgt", "glt" …) or a ``UnitConfig``, which has its own ``expand_dim``.
        device: as in ``nn.Embedding``.
        dtype: as in ``nn.Embedding``.
        settings: ``sparse``, as in ``nn.Embedding``; ``features`` that tokens share beside the table, such as
            ``["characters:8192x16"]``, and ``tokens``, the strings that these read; and any other setting of
            ``UnitConfig``. ``depth`` is the number of layers, N, the last of which reduces to ``embedding_dim``; 1 is
            one projection. ``max_groups`` is g_max.

    ``DeFINE.over(map_layer, …)`` puts the unit behind another map: projective, or adaptive by frequency. An embedding
    with more parameters than a table of V × m gives a warning.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        map_dim: int | None = None,
        expand_dim: int | None = None,
        padding_idx: int | None = None,
        unit: UnitConfig | str = "define",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        sparse = bool(settings.pop("sparse", False))
        features, tokens = settings.pop("features", ()), settings.pop("tokens", None)
        map_dim = default_map_dim(embedding_dim) if map_dim is None else map_dim
        config = UnitConfig.of(unit, embedding_dim=embedding_dim, **settings)
        if expand_dim is None and isinstance(unit, str):
            expand_dim = default_expand_dim(map_dim, embedding_dim, config)
        config = UnitConfig.of(config, expand_dim=expand_dim)
        input_dim = map_dim + concatenated_width(features)
        make_plan(input_dim, config)  # refuses sizes that do not fit before memory is taken for the table
        facts = VocabularyFacts(num_embeddings, None, strings_of(tokens, features, num_embeddings))
        with nullcontext() if device is None else torch.device(device):
            table = StandardMap(num_embeddings, map_dim, padding_idx, sparse=sparse)
            defined = DefineUnit(input_dim, config)
            shared = features_of(features, facts, table, embedding_dim)
        super().__init__(table, defined, embedding_dim, shared)
        if shared is not None:
            shared.sparse = sparse
        self.to(dtype)
        own, plain = sum(p.numel() for p in self.parameters()), num_embeddings * embedding_dim
        if own > plain:
            warnings.warn(
                f"DeFINE has {own:,} parameters here, more than the {plain:,} of a plain table: use a smaller "
                f"map_dim (now {map_dim}) or expand_dim (now {config.expand_dim}), or keep the table.",
                stacklevel=2,
            )

    @classmethod
    def over(
        cls,
        map_layer: MapLayer,
        embedding_dim: int | None = None,
        unit: UnitConfig | str = "define",
        features: Sequence[str] = (),
        vocabulary: VocabularyFacts | None = None,
        **settings: Any,
    ) -> Self:
        """The unit behind any map layer; its input is as wide as the map's output, and features that stand beside it.

        ``vocabulary`` is what features must know of the tokens.
        """
        config = UnitConfig.of(unit, embedding_dim=embedding_dim, **settings)
        defined = DefineUnit(map_layer.output_dim + concatenated_width(features), config)
        embedding = cls.__new__(cls)
        width = defined.plan.embedding_dim
        shared = features_of(features, vocabulary, map_layer, width)
        TokenEmbedding.__init__(embedding, map_layer, defined, width, shared)
        return embedding

    @property
    def plan(self) -> Plan:
        return cast(DefineUnit, self.unit).plan

    def to_config(self) -> dict[str, Any]:
        """The settings ``from_config`` needs to build the same module with fresh weights; plain values only."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "map": self.map.to_config(),
            "row_dropout": self.row_dropout,
            "map_dropout": self.map_dropout,
            "unit": {**to_plain(self.plan.config), "embedding_dim": self.embedding_dim},
            "features": [] if self.features is None else list(self.features.texts),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        check_version(config)
        unit = UnitConfig.read(config["unit"], "unit")
        map_layer, features = map_from_config(config["map"]), config["features"]
        embedding = cls.over(map_layer, unit.embedding_dim, unit, features, VocabularyFacts(map_layer.num_embeddings))
        embedding.row_dropout, embedding.map_dropout = config["row_dropout"], config["map_dropout"]
        return embedding

    def save(self, folder: str | Path) -> None:
        """Write weights, which hold their settings, and the settings once more, for people and for the Hub."""
        config = {**self.to_config(), "torchdefine_version": __version__}
        write_safetensors(Path(folder) / WEIGHTS_FILE, self.state_dict(), {"settings": json.dumps(config)})
        write_sealed(Path(folder) / CONFIG_FILE, config)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what ``save`` wrote; files that were changed since are refused.

        A save that was killed between the two leaves new weights with their own settings, and these count.
        """
        path, settings = Path(folder) / WEIGHTS_FILE, Path(folder) / CONFIG_FILE
        check_version(read_json_file(settings))
        read_sealed(settings, SAVE_AGAIN)
        if not path.exists():
            raise UserError(f"{folder} has no {WEIGHTS_FILE}: {SAVE_AGAIN}.")
        with reading_safetensors(path, if_missing=SAVE_AGAIN, if_damaged=SAVE_AGAIN) as file:
            config = read_json(file.metadata["settings"], f"The header of {path}")
            check_version(config)
            state = file.read()
            with torch.device("meta"), NothingDrawn():  # so that there is one table in memory, the file's
                embedding = cls.from_config(config)
            try:
                embedding.load_state_dict(state, assign=True)
            except RuntimeError as error:
                raise ValueError(str(error).splitlines()[-1].strip()) from None
        return embedding


class NothingDrawn(TorchFunctionMode):
    """Around the making of a module on the meta device, where torch would import its compiler to draw nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.normal_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def check_version(config: dict[str, Any]) -> None:
    if config.get("format") != FORMAT or config.get("version") != FORMAT_VERSION:
        raise UserError(
            f"Expected a {FORMAT} of version {FORMAT_VERSION}, but found {config.get('format')!r} of version "
            f"{config.get('version')!r}: save it again with a matching torchdefine."
        )


def build_embedding(
    embedding: MapConfig, unit: Any, vocabulary: VocabularyFacts, beside_dim: int = 0
) -> TokenEmbedding:
    """The embedding that a recipe's two sections ask for, with fresh weights.

    Its last step, the unit or the map's projection, gives ``beside_dim`` numbers more, for the layers of the model.
    """
    width = getattr(unit, "embedding_dim", None)
    if beside_dim:
        embedding, unit = _widened(embedding, unit, beside_dim)
    map_layer = embedding.build(vocabulary, width)
    width = getattr(unit, "embedding_dim", None)
    features = embedding.features
    if isinstance(unit, UnitConfig):
        built: TokenEmbedding = DeFINE.over(map_layer, unit=unit, features=features, vocabulary=vocabulary)
    else:
        between = unit.build(map_layer.output_dim + concatenated_width(features))
        shared = features_of(features, vocabulary, map_layer, width or map_layer.output_dim, between is not None)
        built = TokenEmbedding(map_layer, between, width, shared)
    map_layer.reset_parameters(embedding.std)
    if built.features is not None:
        built.features.reset_parameters(embedding.initial_rms * embedding.factor(map_layer.output_dim))
    built.row_dropout, built.map_dropout = embedding.row_dropout, embedding.map_dropout
    built.beside_dim = beside_dim
    return built


def _widened(embedding: Any, unit: Any, beside_dim: int) -> tuple[Any, Any]:
    """The settings of the last step with a wider output."""
    if getattr(unit, "embedding_dim", None):
        return embedding, replace(unit, embedding_dim=unit.embedding_dim + beside_dim)
    if unit.kind == "none" and getattr(embedding, "output_dim", None):
        return replace(embedding, output_dim=embedding.output_dim + beside_dim), unit
    raise UserError(
        "context.layer_rank takes vectors from the unit or the projection behind the table: set unit.embedding_dim, or "
        "embedding.output_dim where there is no unit."
    )


def features_of(
    features: Sequence[str], vocabulary: VocabularyFacts | None, map_layer: MapLayer, width: int, has_unit: bool = True
) -> Features | None:
    """What tokens share beside a map, where they share anything."""
    if not features:
        return None
    facts = vocabulary or VocabularyFacts(map_layer.num_embeddings)
    return Features(features, facts, map_layer.output_dim, width, has_unit, map_layer.padding_idx)


def map_from_config(config: dict[str, Any]) -> MapLayer:
    """Build a map layer from what its ``to_config`` gave; weights are drawn anew."""
    settings = dict(config)
    later = {name: settings.pop(name) for name in ("std", "projection_std") if name in settings}
    kind, ranked = settings.pop("kind", None), settings.pop("ranked", False)
    if kind not in MAPS:
        raise UserError(f"The map {kind!r} is unknown: use {', '.join(MAPS)}.")
    if ranked:  # the real ranks come with the weights
        settings["counts"] = torch.zeros(settings["num_embeddings"])
    layer = MAPS[kind](**settings)
    for name, value in later.items():  # of the weights to be loaded, so that rows added later are drawn like them
        setattr(layer, name, value)
    return layer
