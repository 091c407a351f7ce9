"""The training loop: one for every model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from torchdefine.errors import MachineError
from torchdefine.recipe import Recipe, for_five_validations
from torchdefine.spelling import option
from torchdefine.training.averaging import WeightAverage, stalled
from torchdefine.training.batches import TrainingData
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluate import perplexity
from torchdefine.training.optimizers import make_optimizer
from torchdefine.training.precision import Precision
from torchdefine.training.progress import Reporter
from torchdefine.training.run_folder import RunFolder
from torchdefine.training.run_state import Position, RunState
from torchdefine.training.schedules import Schedule
from torchdefine.training.step import StepParts, TrainingStep
from torchdefine.training.stopping import stop_requests

CURE = "in a new run, try a smaller optim.lr, a schedule.warmup or a smaller optim.clip"
"""Advice for a run that diverges."""


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
    """Trains a model on batches and keeps the run folder up to date.

    The model's forward takes a batch's inputs, the carried state and ``hint=``, and gives ``Losses`` and the state
    after; ``initial_state`` and ``host_hint`` are its other two methods. ``validate`` evaluates the current weights on
    the validation text, or is None where there is none.
    """

    def __init__(
        self,
        model: Any,
        data: TrainingData,
        recipe: Recipe,
        folder: RunFolder,
        validate: Callable[[], Validation] | None,
        processes: Processes,
        reporter: Reporter,
    ) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.settings, self.optim = recipe.train, recipe.optim
        self.label_smoothing = recipe.output.label_smoothing
        self.validate, self.processes, self.reporter = validate, processes, reporter
        self.device = next(model.parameters()).device
        self.precision = Precision(self.settings.precision, self.device)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(trained.values(), self.optim, self.device)
        self.average = WeightAverage(trained)
        if self.optim.averaging == "always":
            self.average.start()
        self.step = TrainingStep(
            StepParts(model, processes.wrap(model), self.optimizer, self.precision),
            [data.rows_per_part] * self.settings.accumulate,
            self.optim.clip,
            recorded=self.settings.record and processes.count == 1,
        )
        drop_unit = 1.0 if self.settings.steps else data.steps_per_epoch
        self.schedule = Schedule(recipe.schedule, data.total_steps, drop_unit)
        self.state = RunState(folder, processes, model, self.optimizer, self.average, self.precision, self.step)
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
        self.reporter.started(self.position.step, self.data.total_steps)
        try:
            with stop_requests() as stop_asked, self.precision.matmul_mode():
                self._steps(stop_asked)
        finally:
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
                    f"Stopped at step {step}; the run in {self.folder.path} goes on from there by {option('resume')}."
                )

    def _all_agree_to_stop(self, asked: bool, may_ask_others: bool) -> bool:
        """Several processes must stop at the same step, so they ask each other, and only when they log."""
        if self.processes.count == 1:
            return asked
        return may_ask_others and self.processes.any(asked, self.device)

    def _train_step(self) -> None:
        position = self.position
        batch = self.data.batch(position.step)
        self._rate = self.optim.lr * self.schedule.ratio(position.step, position.plateau_drops)
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
            self.folder.log("train", record)
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
            schedule = self.schedule.settings
            if schedule.kind == "plateau" and position.stale_validations > schedule.patience:
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
            self.folder.log("valid", record)
            self.reporter.validated(record)
        self._react_to_stall(loss)

    def _react_to_stall(self, loss: float) -> None:
        """Start averaging, or end the run, where the recipe says so."""
        earlier = self.position.validation_losses
        has_stalled = stalled(earlier, loss, self.optim.stall_patience)
        earlier.append(loss)
        if has_stalled and self.optim.averaging == "stalled" and not self.average.running:
            self.average.start()
            earlier.clear()  # the average has a record of its own
        elif has_stalled:
            self.position.finished = self.settings.stop_when_stalled

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
        kept = (
            f"The checkpoint in {self.folder.last.parent} is from before that"
            if self.folder.last.exists()
            else "No checkpoint was written yet"
        )
        raise Diverged(f"{what}. {kept}; {CURE}, or train.precision fp32.")

    def _write_last(self) -> None:
        self._check_finite()
        self._count_seconds()
        self.state.write_last()


def _steps_between_validations(recipe: Recipe, data: TrainingData) -> int:
    """As the recipe says, 0 for once an epoch; if training ends within the first epoch, enough for five validations."""
    ends_before = recipe.train.steps is not None and data.total_steps < data.steps_per_epoch
    if recipe.train.eval_every or not ends_before or recipe.trains_by_validations():
        return recipe.train.eval_every
    return for_five_validations(data.total_steps)
