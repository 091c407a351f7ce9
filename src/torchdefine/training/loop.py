"""The training loop: one for every model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torchdefine.config import Config, setting
from torchdefine.errors import MachineError
from torchdefine.modes import prepare
from torchdefine.spelling import option
from torchdefine.training.averaging import AlwaysAveragingConfig, StalledAveragingConfig, WeightAverage, stalled
from torchdefine.training.batches import TrainingData
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluation import perplexity
from torchdefine.training.optimizers import OptimizerConfig
from torchdefine.training.precision import Precision
from torchdefine.training.progress import Reporter
from torchdefine.training.schedules import ConstantConfig
from torchdefine.training.state import Keeper, Position, RunState
from torchdefine.training.step import StepParts, TrainingStep
from torchdefine.training.stopping import stop_requests

CURE = "in a new run, try a smaller optim.lr, a schedule.warmup or a smaller optim.clip"
"""Advice for a run that diverges."""


@dataclass(frozen=True)
class TrainConfig(Config):
    """How long and how a model is trained, whatever its task."""

    epochs: float | None = setting(None, "Passes over the training text; 1 if no steps are given.", above=0)
    steps: int | None = setting(None, "Steps, instead of epochs.", at_least=1)
    accumulate: int = setting(
        1, "Gradient accumulation: the parts that a step is computed in, to save memory.", at_least=1
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = setting(
        "fp32", "Mixed precision: the arithmetic of the matrix products on a GPU; a CPU computes in fp32."
    )
    compile: bool = setting(False, "Run the embedding and a Transformer-XL's layers through torch.compile.")
    cuda_graphs: bool = setting(
        True, "With one process on a GPU, record each kind of step as a CUDA graph and replay it."
    )
    start_from: str | None = setting(
        None, "A run whose best weights this one starts from, as fine-tuning does.", path=True
    )
    early_stopping: int | None = setting(
        None, "End the run when validation is worse than the best before the last N.", at_least=0
    )
    seed: int = setting(1, "Decides initial weights, dropout and the order of the data.", at_least=0, below=2**62)
    eval_every: int = setting(
        0, "Steps between validations; 0 for once an epoch, or for five in a run of fewer steps.", at_least=0
    )
    log_every: int = setting(50, "Steps between lines of the log.", at_least=1)
    checkpoint_every: int = setting(
        500, "Steps between checkpoints to go on from; the best weights are kept at every validation.", at_least=1
    )
    keep: int = setting(0, "How many of the latest validations' weights stay, for `average`.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.epochs is not None and self.steps is not None
        self.require(not both, "epochs and train.steps both say how long to train: give one of them.")


class TrainingRecipe(Protocol):
    """The sections of a recipe that the loop reads."""

    @property
    def train(self) -> TrainConfig: ...

    @property
    def optim(self) -> OptimizerConfig: ...

    @property
    def schedule(self) -> ConstantConfig: ...

    @property
    def averaging(self) -> Config: ...


def goes_by_validations(recipe: TrainingRecipe) -> bool:
    """Whether validations decide how training goes on, so that more of them would change the run."""
    averages = isinstance(recipe.averaging, StalledAveragingConfig)
    return averages or recipe.train.early_stopping is not None or recipe.schedule.drops_after(2**62)


def for_five_validations(steps: int) -> int:
    """How many steps apart five validations are, the last of them at the end."""
    return -(-steps // 5)


class Interrupted(MachineError):
    """Training was asked to stop; the checkpoint lets it go on."""


class Diverged(MachineError):
    """The loss or its gradient is not finite, or the loss scale collapsed: the run is lost, a sweep may go on."""


class Validation(Protocol):
    """What the loop needs of an evaluation."""

    @property
    def loss(self) -> float: ...

    @property
    def perplexity(self) -> float: ...


class Trainer:
    """Trains a model on batches and hands its log and its checkpoints to a keeper.

    The model's forward takes a batch's inputs, the carried state and ``hint=``, and gives ``Losses`` and the state
    after; ``initial_state`` and ``host_hint`` are its other two methods. ``validate`` evaluates the current weights on
    the validation text, or is None where there is none.
    """

    def __init__(
        self,
        model: Any,
        data: TrainingData,
        recipe: TrainingRecipe,
        keeper: Keeper,
        validate: Callable[[], Validation] | None,
        processes: Processes,
        reporter: Reporter,
    ) -> None:
        self.model, self.data, self.keeper = model, data, keeper
        self.settings, self.optim, self.schedule = recipe.train, recipe.optim, recipe.schedule
        self.averaging = recipe.averaging
        self.label_smoothing = getattr(model, "label_smoothing", 0.0)
        self.validate, self.processes, self.reporter = validate, processes, reporter
        self.device = next(model.parameters()).device
        self.precision = Precision(self.settings.precision, self.device)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = self.optim.build(trained.values(), self.device)
        self.average = WeightAverage(trained)
        if isinstance(self.averaging, AlwaysAveragingConfig):
            self.average.start()
        self.step = TrainingStep(
            StepParts(model, processes.wrap(model), self.optimizer, self.precision),
            [data.rows_per_part] * self.settings.accumulate,
            self.optim.clip,
            recorded=self.settings.cuda_graphs and processes.count == 1,
        )
        self.drop_unit = 1.0 if self.settings.steps else data.steps_per_epoch
        self.state = RunState(keeper, processes, model, self.optimizer, self.average, self.precision, self.step)
        self.eval_every = _steps_between_validations(recipe, data)
        self._rate = 0.0
        self._tokens_since_log, self._seconds_since_log = 0, 0.0
        self._clock = time.monotonic()

    @property
    def position(self) -> Position:
        return self.state.position

    def resume(self) -> None:
        """Continue the run from its last checkpoint, or from its beginning if it has written none."""
        self.state.restore()

    def run(self) -> Position:
        """Train to the end, or raise ``Interrupted`` after writing a checkpoint."""
        self.model.train()
        prepare(self.model)
        self.reporter.started(self.position.step, self.data.total_steps)
        try:
            with stop_requests() as stop_asked, self.precision.matmul_mode():
                self._steps(stop_asked)
        finally:
            prepare(self.model, on=False)
            self.reporter.finished()
        if not self.position.best_step:
            raise Diverged(f"No validation gave a finite perplexity, so no weights were kept as best; {CURE}.")
        return self.position

    def _steps(self, stop_asked: Callable[[], bool]) -> None:
        self._clock = time.monotonic()
        started = self._clock - self.position.total_seconds
        while self.position.step < self.data.total_steps and not self.position.finished:
            self._train_step()
            self.position.total_seconds = time.monotonic() - started
            step = self.position.step
            logging = step % self.settings.log_every == 0 or step == self.data.total_steps
            if logging:
                self._log()
            if self._validation_due():
                self._validate()
            ends = self.position.finished or step == self.data.total_steps
            if ends or step % self.settings.checkpoint_every == 0:
                self._write_last()
            if not ends and self._all_agree_to_stop(stop_asked(), logging):
                self._write_last()
                raise Interrupted(
                    f"Stopped at step {step}; the run in {self.keeper} goes on from there by {option('resume')}."
                )

    def _all_agree_to_stop(self, asked: bool, may_ask_others: bool) -> bool:
        """Several processes must stop at the same step, so they ask each other, and only when they log."""
        if self.processes.count == 1:
            return asked
        return may_ask_others and self.processes.any(asked, self.device)

    def _train_step(self) -> None:
        position = self.position
        batch = self.data.batch(position.step)
        self._rate = self.optim.lr * self.schedule.ratio(
            position.step, self.data.total_steps, self.drop_unit, position.plateau_drops
        )
        self.step(batch, self._rate * batch.rate)
        if self.average.running:
            self.average.update()
        tokens = batch.tokens * self.processes.count
        position.step += 1
        position.tokens += tokens
        self.state.unlogged_steps += 1
        self._tokens_since_log += tokens

    def _log(self) -> None:
        loss = (
            float(self.processes.mean(self.step.summed_loss)) / self.state.unlogged_steps
        )  # the first look at the device
        self._check_finite()
        self._count_seconds()
        speed = self._tokens_since_log / max(self._seconds_since_log, 1e-9)
        record = {
            "step": self.position.step,
            "epoch": round(self.data.epoch_after(self.position.step), 4),
            "tokens": self.position.tokens,
            "loss": loss,
            # A smoothed loss gives no perplexity, and the plain loss would have to be computed as well.
            **({"label_smoothing": self.label_smoothing} if self.label_smoothing else {"perplexity": perplexity(loss)}),
            "lr": self._rate,
            "gradient_norm": float(self.step.gradient_norm),
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.position.total_seconds, 3),
        }
        self.step.summed_loss.zero_()
        self.state.unlogged_steps = self._tokens_since_log = 0
        self._seconds_since_log = 0.0
        if self.processes.is_first:
            self.keeper.log("train", record)
            self.reporter.trained(record)

    def _count_seconds(self) -> None:
        """Add the time since the clock was last read to that spent on training."""
        now = time.monotonic()
        self._seconds_since_log += now - self._clock
        self.position.train_seconds += now - self._clock
        self._clock = now

    def _validation_due(self) -> bool:
        step, every = self.position.step, self.eval_every
        epoch_ends = self.data.epoch_after(step).is_integer()
        return (step % every == 0 if every else epoch_ends) or step == self.data.total_steps

    def _validate(self) -> None:
        """Evaluate, keep the best weights, and decide what follows."""
        self._check_finite()
        self._count_seconds()
        with self.average.in_place():
            if self.validate is None:
                self.position.best_step = self.position.step
                self.state.write_best()
            else:
                self._judge(self.validate())
        self._clock = time.monotonic()  # validation is not training time

    def _judge(self, evaluation: Validation) -> None:
        position, averaged = self.position, self.average.running
        loss = self.processes.of_first(evaluation.loss, self.device)
        better = loss < position.best_loss and math.isfinite(perplexity(loss))
        if better:
            position.best_loss, position.best_step, position.stale_validations = loss, position.step, 0
            self.state.write_best()
        else:
            position.stale_validations += 1
            if self.schedule.drops_after(position.stale_validations):
                position.plateau_drops += 1
                position.stale_validations = 0
        record = {
            "step": position.step,
            "tokens": position.tokens,
            "seconds": round(position.total_seconds, 3),
            "loss": loss,
            "perplexity": evaluation.perplexity,
            "best": better,
            **({"averaged_steps": self.average.steps} if averaged else {}),
        }
        if self.processes.is_first:
            self.keeper.log("valid", record)
            self.reporter.validated(record)
        self._react_to_stall(loss)

    def _react_to_stall(self, loss: float) -> None:
        """Start averaging, or end the run, where the recipe says so."""
        earlier, averaging, patience = self.position.validation_losses, self.averaging, self.settings.early_stopping
        waiting = isinstance(averaging, StalledAveragingConfig) and not self.average.running
        averages = waiting and stalled(earlier, loss, averaging.patience)  # type: ignore[union-attr]
        ends = patience is not None and stalled(earlier, loss, patience)
        earlier.append(loss)
        if averages:
            self.average.start()
            earlier.clear()  # the average has a record of its own
        elif ends:
            self.position.finished = True

    def _check_finite(self) -> None:
        bad = int(self.step.first_bad_step)
        collapsed = self.precision.scale_collapsed()
        if bad < 0 and not collapsed:
            return
        if bad < 0:
            what = f"The loss scale of fp16 collapsed by step {self.position.step}"
        else:
            place = self.data.batch(max(bad, 1) - 1).place
            what = f"The loss or its gradient stopped being finite at step {bad} ({place})"
        written = self.position.step >= self.settings.checkpoint_every
        kept = "The last checkpoint is from before that" if written else "No checkpoint was written yet"
        raise Diverged(f"{what}. {kept}; {CURE}, or train.precision fp32.")

    def _write_last(self) -> None:
        self._check_finite()
        self._count_seconds()
        self.state.write_last()


def _steps_between_validations(recipe: TrainingRecipe, data: TrainingData) -> int:
    """As the recipe says, 0 for once an epoch; if training ends within the first epoch, enough for five validations."""
    ends_before = recipe.train.steps is not None and data.total_steps < data.steps_per_epoch
    if recipe.train.eval_every or not ends_before or goes_by_validations(recipe):
        return recipe.train.eval_every
    return for_five_validations(data.total_steps)
