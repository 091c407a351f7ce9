"""The sections of a recipe for a masked language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchdefine.config import Config, setting
from torchdefine.embedding import EMBEDDINGS, UNITS, MapConfig
from torchdefine.embedding.features import check_features
from torchdefine.output import OUTPUTS, OutputConfig
from torchdefine.task import Recipe, section
from torchdefine.tasks.masked.batches import MaskingConfig
from torchdefine.tasks.masked.encoder import EncoderConfig
from torchdefine.tasks.masked.text import MaskedTextConfig
from torchdefine.training import AVERAGING, OPTIMIZERS, SCHEDULES, ConstantConfig, OptimizerConfig
from torchdefine.training.loop import TrainConfig


@dataclass(frozen=True)
class MaskedTrainConfig(TrainConfig):
    """How a masked language model is trained."""

    batch_size: int = setting(64, "Rows of text in a step, in all processes together.", at_least=1)
    length: int = setting(128, "Tokens of a row.", at_least=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        equal = self.batch_size % self.accumulate == 0
        self.require(equal, f"batch_size {self.batch_size} cannot be split into {self.accumulate} equal parts.")


@dataclass(frozen=True)
class MaskedEvalConfig(Config):
    """How masked perplexities are measured."""

    batch_size: int = setting(64, "Rows at a time.", at_least=1)
    seed: int = setting(0, "Seed that chooses the hidden tokens.", at_least=0, below=2**62)


@dataclass(frozen=True)
class MaskedRecipe(Recipe):
    """A masked language model: embedding → unit → encoder → head → output."""

    task: ClassVar[str] = "masked"
    data: MaskedTextConfig = section(MaskedTextConfig)
    masking: MaskingConfig = section(MaskingConfig)
    embedding: MapConfig = section(EMBEDDINGS, model=True)
    unit: Config = section(UNITS, model=True)
    context: EncoderConfig = section(EncoderConfig, model=True)
    output: OutputConfig = section(OUTPUTS, model=True)
    optim: OptimizerConfig = section(OPTIMIZERS)
    schedule: ConstantConfig = section(SCHEDULES)
    averaging: Config = section(AVERAGING)
    train: MaskedTrainConfig = section(MaskedTrainConfig)
    eval: MaskedEvalConfig = section(MaskedEvalConfig)

    def __post_init__(self) -> None:
        self.output.check(self.embedding)
        check_features(self.embedding.features, "a masked language model", pairs=False)
        self.optim.check_sparse(self.output.tied != "none", self.train.compile)
        self.require(
            self.train.length <= self.context.most_places,
            f"train.length {self.train.length} is more than the encoder's places: set context.most_places to it.",
        )
