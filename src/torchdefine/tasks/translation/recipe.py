"""The sections of a recipe for a translator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchdefine.config import Config, setting
from torchdefine.context import TransformerConfig
from torchdefine.data import BitextConfig
from torchdefine.embedding import EMBEDDINGS, UNITS, MapConfig
from torchdefine.embedding.features import check_features
from torchdefine.output import OUTPUTS, LossConfig, OutputConfig
from torchdefine.task import Recipe, section
from torchdefine.tasks.translation.beam import BeamConfig
from torchdefine.training import AVERAGING, OPTIMIZERS, SCHEDULES, ConstantConfig, OptimizerConfig
from torchdefine.training.loop import TrainConfig


@dataclass(frozen=True)
class SourceConfig(Config):
    """The source side."""

    share: Literal["nothing", "unit", "embedding"] = setting(
        "nothing", "What source and target side share; a shared embedding needs a joint BPE."
    )
    embedding: dict[str, Any] = setting(
        {}, "Settings of the source side that differ from the section embedding, such as {map_dim: 64}."
    )
    unit: dict[str, Any] = setting(
        {}, "Settings of the source side that differ from the section unit, such as {kind: none}."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.share == "nothing" or not (self.embedding or self.unit),
            f"share is {self.share}, so the source side cannot differ: use source.share nothing, or leave "
            "source.embedding and source.unit out.",
        )


@dataclass(frozen=True)
class TranslationTrainConfig(TrainConfig):
    """How a translator is trained."""

    batch_tokens: int = setting(4096, "Tokens of a batch on its longer side, with padding.", at_least=1)


@dataclass(frozen=True)
class TranslationRecipe(Recipe):
    """A translator: embeddings on both sides of a Transformer."""

    task: ClassVar[str] = "translation"
    data: BitextConfig = section(BitextConfig)
    embedding: MapConfig = section(EMBEDDINGS, model=True)
    unit: Config = section(UNITS, model=True)
    source: SourceConfig = section(SourceConfig, model=True)
    context: TransformerConfig = section(TransformerConfig, model=True)
    output: OutputConfig = section(OUTPUTS, model=True)
    loss: LossConfig = section(LossConfig)
    optim: OptimizerConfig = section(OPTIMIZERS)
    schedule: ConstantConfig = section(SCHEDULES)
    averaging: Config = section(AVERAGING)
    train: TranslationTrainConfig = section(TranslationTrainConfig)
    beam: BeamConfig = section(BeamConfig)

    def __post_init__(self) -> None:
        self.output.check(self.embedding)
        source = EMBEDDINGS.changed(self.embedding, self.source.embedding, "source.embedding")
        check_features((*self.embedding.features, *source.features), "a translator", pairs=False)
        self.optim.check_sparse(self.output.tied != "none", self.train.compile)
        joint = self.data.joint or self.data.tokenizer is not None
        self.require(
            joint or self.source.share != "embedding",
            "A shared embedding needs one BPE for both languages: use data.joint true, or another source.share.",
        )
        self.require(
            self.source.share != "unit" or self.unit.kind != "none",  # type: ignore[attr-defined]
            "There is no unit to share: use unit.kind define, or source.share nothing.",
        )
