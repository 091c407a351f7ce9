"""Masked language models: some tokens of a text are hidden, and predicted from all that are not."""

from torchdefine.tasks.masked.batches import MaskedBatches, MaskingConfig, PackedRows
from torchdefine.tasks.masked.encoder import Encoder, EncoderConfig
from torchdefine.tasks.masked.evaluate import evaluate
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.recipe import MaskedRecipe, MaskedTrainConfig
from torchdefine.tasks.masked.run import MaskedRun
from torchdefine.tasks.masked.task import MaskedTask, build_masked_model
from torchdefine.tasks.masked.text import MaskedTextConfig, MaskedTokenizer, open_text

__all__ = [
    "Encoder",
    "EncoderConfig",
    "MaskedBatches",
    "MaskedModel",
    "MaskedRecipe",
    "MaskedRun",
    "MaskedTask",
    "MaskedTextConfig",
    "MaskedTokenizer",
    "MaskedTrainConfig",
    "MaskingConfig",
    "PackedRows",
    "build_masked_model",
    "evaluate",
    "open_text",
]
