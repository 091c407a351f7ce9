"""From a model and batches to a trained model: the loop and what it is built on."""

from torchdefine.training.averaging import AVERAGING
from torchdefine.training.evaluation import Evaluation
from torchdefine.training.loop import Diverged, Interrupted, TrainConfig, Trainer
from torchdefine.training.optimizers import OPTIMIZERS, OptimizerConfig, RowwiseAdagrad, clip_gradients
from torchdefine.training.schedules import SCHEDULES, ConstantConfig

__all__ = [
    "AVERAGING",
    "OPTIMIZERS",
    "SCHEDULES",
    "ConstantConfig",
    "Diverged",
    "Evaluation",
    "Interrupted",
    "OptimizerConfig",
    "RowwiseAdagrad",
    "TrainConfig",
    "Trainer",
    "clip_gradients",
]
