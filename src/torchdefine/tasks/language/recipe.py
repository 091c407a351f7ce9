"""The sections of a recipe for a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchdefine.config import Config, setting
from torchdefine.context import CONTEXTS
from torchdefine.data import TextConfig
from torchdefine.embedding import EMBEDDINGS, UNITS, MapConfig
from torchdefine.embedding.features import FeatureConfig, check_features
from torchdefine.output import OUTPUTS, OutputConfig
from torchdefine.task import Recipe, section
from torchdefine.tasks.language.model import LanguageLossConfig
from torchdefine.training import AVERAGING, OPTIMIZERS, SCHEDULES, ConstantConfig, OptimizerConfig
from torchdefine.training.loop import TrainConfig


@dataclass(frozen=True)
class LanguageTrainConfig(TrainConfig):
    """How a language model is trained."""

    batch_size: int = setting(32, "Streams of text that are read in parallel, in all processes together.", at_least=1)
    length: int = setting(70, "Tokens of each stream in a step (truncated back-propagation through time).", at_least=1)
    random_length: bool = setting(False, "Draw the length of every segment, and scale the learning rate with it.")

    def __post_init__(self) -> None:
        super().__post_init__()
        equal = self.batch_size % self.accumulate == 0
        self.require(equal, f"batch_size {self.batch_size} cannot be split into {self.accumulate} equal parts.")


@dataclass(frozen=True)
class EvalConfig(Config):
    """How perplexities are measured."""

    batch_size: int = setting(
        10, "Streams that the text is cut into. Each starts without context, so 1 is exact.", at_least=1
    )
    length: int = setting(
        140, "Tokens per step; it changes only the results of a Transformer-XL without eval_same_length.", at_least=1
    )
    valid_batch_size: int | None = setting(
        None, "Streams of the validations during training; by default batch_size.", at_least=1
    )
    public: bool = setting(
        False, "Also report a result with 10 streams, the protocol of the public Transformer-XL code."
    )


@dataclass(frozen=True)
class LanguageRecipe(Recipe):
    """A language model: embedding → unit → context → output."""

    task: ClassVar[str] = "language"
    data: TextConfig = section(TextConfig)
    embedding: MapConfig = section(EMBEDDINGS, model=True)
    unit: Config = section(UNITS, model=True)
    context: Config = section(CONTEXTS, model=True)
    output: OutputConfig = section(OUTPUTS, model=True)
    loss: LanguageLossConfig = section(LanguageLossConfig)
    optim: OptimizerConfig = section(OPTIMIZERS)
    schedule: ConstantConfig = section(SCHEDULES)
    averaging: Config = section(AVERAGING)
    train: LanguageTrainConfig = section(LanguageTrainConfig)
    eval: EvalConfig = section(EvalConfig)

    def __post_init__(self) -> None:
        self.output.check(self.embedding)
        check_features(self.embedding.features, "a language model", pairs=True)
        through = [text for text in self.embedding.features if FeatureConfig.of(text).pairs_through_unit]
        self.require(
            not through or self.output.tied != "finished" or self.unit.kind == "none",  # type: ignore[attr-defined]
            f"output.tied finished compares with one vector of each token, but {', '.join(through)} goes through the "
            "unit: add it behind, as in bigrams:16384x16:after, or use output.tied table or none.",
        )
        self.optim.check_sparse(self.output.tied != "none", self.train.compile)
