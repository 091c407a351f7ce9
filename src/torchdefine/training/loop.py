"""The training loop: one for every model."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from torchdefine.config import Config, setting
from torchdefine.errors import MachineError, UserError
from torchdefine.modes import evaluating, prepare
from torchdefine.spelling import option
from torchdefine.training.averaging import StalledAveragingConfig, WeightAverage, stalled
from torchdefine.training.checkpoint import Checkpoint, Position, checkpoint_of, restore, weights_of
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluation import Evaluation, perplexity
from torchdefine.training.precision import Precision
from torchdefine.training.progress import Reporter
from torchdefine.training.step import TrainingData, TrainingStep

CURE = "in a new run, try a smaller optim.lr, a schedule.warmup or a smaller optim.clip"
"""Advice for a run that diverges."""


@dataclass(frozen=True)
class TrainConfig(Config):
    """How long and how a model is trained, whatever its task."""

    epochs: float | None = setting(None, "Passes over the training text; 1 if steps is not set.", above=0)
    steps: int | None = setting(None, "Training steps, instead of epochs.", at_least=1)
    accumulate: int = setting(1, "Gradient accumulation: the number of parts that a batch is split into.", at_least=1)
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = setting("fp32", "Precision; a CPU always computes in fp32.")
    compile: bool = setting(False, "Compile the embedding and the layers of a Transformer-XL with torch.compile.")
    cuda_graphs: bool = setting(True, "Replay training steps as CUDA graphs; only with one process on a GPU.")
    start_from: str | None = setting(
        None, "Folder of a run whose best weights this run starts from (fine-tuning).", path=True
    )
    early_stopping: int | None = setting(
        None, "Stop when a validation is worse than the best one before the last N.", at_least=0
    )
    seed: int = setting(1, "Seed of initial weights, dropout and the order of the data.", at_least=0, below=2**62)
    eval_every: int = setting(
        0, "Steps between validations. 0: one per epoch; in a shorter run, five in all.", at_least=0
    )
    log_every: int = setting(50, "Steps between log lines.", at_least=1)
    checkpoint_every: int = setting(500, "Steps between checkpoints, from which a run can be resumed.", at_least=1)
    keep: int = setting(0, "Number of the latest validations whose weights are kept, for `average`.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.epochs is not None and self.steps is not None
        self.require(not both, "epochs and train.steps both say how long to train: give one of them.")


def decided_by_validations(recipe: Any) -> list[str]:
    """The settings of a recipe by which validations decide how training goes on: more of them would change the run."""
    decided = {
        "schedule.kind plateau": recipe.schedule.drops_after(2**62),
        "averaging.kind stalled": isinstance(recipe.averaging, StalledAveragingConfig),
        "train.early_stopping": recipe.train.early_stopping is not None,
    }
    return [name for name, applies in decided.items() if applies]


def for_five_validations(steps: int) -> int:
    """How many steps apart five validations are, the last of them at the end."""
    return -(-steps // 5)


class Interrupted(MachineError):
    """Training was asked to stop; the checkpoint lets it go on."""

    exit_code = 130  # as of a command that Ctrl-C ended


class Diverged(MachineError):
    """The loss or its gradient is not finite, or the loss scale collapsed: the run is lost, a sweep may go on."""


class Trainer:
    """Trains a model on batches and hands its log and its checkpoints to a keeper.

    The model's forward takes a batch's inputs, the carried state and ``hint=``, and gives ``Losses`` and the state
    after; ``initial_state`` and ``host_hint`` are its other two methods. ``recipe`` has the sections train, optim,
    schedule and averaging; ``keeper`` has ``log``, ``forget_after``, ``write``, ``keep`` and ``read_last``, as the
    folder of a run has. ``validate`` evaluates the current weights, or is None where there is no validation text.
    """

    def __init__(
        self,
        model: Any,
        data: TrainingData,
        recipe: Any,
        keeper: Any,
        validate: Callable[[], Evaluation] | None,
        processes: Processes,
        reporter: Reporter,
    ) -> None:
        config: TrainConfig = recipe.train
        by_validations = decided_by_validations(recipe)
        if validate is None and (names := [*by_validations, *(["train.keep"] if config.keep else [])]):
            raise UserError(
                f"{names[0]} needs validations, but there is no validation text: add one, or change the setting."
            )
        self.model, self.data, self.recipe, self.config = model, data, recipe, config
        self.keeper, self.validate, self.processes, self.reporter = keeper, validate, processes, reporter
        self.device = next(model.parameters()).device
        self.precision = Precision(config.precision, self.device)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tables = self._sparse_tables()
        optimizer = recipe.optim.build_with_tables(trained.values(), tables, self.device)
        self.average = WeightAverage(trained)
        if recipe.averaging.kind == "always":
            self.average.start()
        self.step = TrainingStep(
            model,
            processes.wrap(model),
            optimizer,
            self.precision,
            [data.rows_per_part] * config.accumulate,
            recipe.optim.clip,
            recorded=config.cuda_graphs and processes.count == 1,
        )
        self.position = Position()
        self.eval_every = config.eval_every
        within_an_epoch = config.steps is not None and data.total_steps < data.steps_per_epoch
        if within_an_epoch and not config.eval_every and not by_validations:
            self.eval_every = for_five_validations(data.total_steps)
        self._rate, self._clock, self._logged = 0.0, 0.0, (0, 0.0)

    def _sparse_tables(self) -> list[nn.Parameter]:
        """The tables that ``optim.sparse`` gives an optimiser of their own; their gradients are sparse from here on."""
        sparse = self.recipe.optim.sparse
        if sparse == "none":
            return []
        if self.device.type == "cuda":
            problem = f"optim.sparse {sparse} makes the host wait for the GPU"
            if self.config.cuda_graphs and self.processes.count == 1:
                problem += ", which a CUDA graph cannot hold"
                raise UserError(f"{problem}: set train.cuda_graphs to false, or optim.sparse to none.")
            if self.processes.count > 1:
                problem = "The processes of several GPUs average gradients by NCCL, which has no sparse ones"
                raise UserError(f"{problem}: set optim.sparse to none, or train with one process.")
        tables: dict[nn.Parameter, None] = {}
        for side, embedding in self.model.embeddings().items():
            if not hasattr(embedding.map, "sparse"):
                problem = f"optim.sparse {sparse} needs a map with sparse gradients"
                of = f" ({side})" if side else ""
                raise UserError(f"{problem}, but {type(embedding.map).__name__}{of} has none: set it to none.")
            embedding.map.sparse = True
            parts = [*embedding.map.modules()]
            if embedding.features is not None:
                embedding.features.sparse = True
                parts += embedding.features.modules()
            tables |= dict.fromkeys(p for part in parts if isinstance(part, nn.Embedding) for p in part.parameters())
        return [table for table in tables if table.requires_grad]

    def resume(self) -> None:
        """Continue the run from its last checkpoint, or from its beginning if it has written none."""
        checkpoint = self.keeper.read_last()
        if checkpoint is not None:
            self.position = restore(checkpoint, self.step, self.average, self.processes)
        if self.processes.is_first:
            self.keeper.forget_after(-1 if checkpoint is None else self.position.step)

    def run(self) -> None:
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
            raise Diverged(f"No validation had a finite perplexity, so there are no best weights; {CURE}.")

    def _steps(self, stop_asked: Callable[[], bool]) -> None:
        position, data, config = self.position, self.data, self.config
        self._clock = time.monotonic()
        self._logged = position.tokens, position.train_seconds
        started = self._clock - position.total_seconds
        while position.step < data.total_steps and not position.finished:
            self._train_step()
            position.total_seconds = time.monotonic() - started
            step, is_last = position.step, position.step == data.total_steps
            logs = is_last or step % config.log_every == 0
            if logs:
                self._log()
            if is_last or (step % self.eval_every == 0 if self.eval_every else data.epoch_after(step).is_integer()):
                self._validate()
            ends = is_last or position.finished
            # Several processes must stop at the same step, so they ask each other, and only when they log.
            asked = (
                stop_asked() if self.processes.count == 1 else logs and self.processes.any(stop_asked(), self.device)
            )
            if ends or asked or step % config.checkpoint_every == 0:
                self._write_last()
            if asked and not ends:
                again = option("resume")
                raise Interrupted(f"Stopped at step {step}; continue the run in {self.keeper} with {again}.")

    def _train_step(self) -> None:
        position, data = self.position, self.data
        batch = data.batch(position.step)
        drop_unit = 1.0 if self.config.steps else data.steps_per_epoch
        schedule, drops = self.recipe.schedule, position.plateau_drops
        self._rate = self.recipe.optim.lr * schedule.ratio(position.step, data.total_steps, drop_unit, drops)
        self.step(batch, self._rate * batch.rate)
        if self.average.running:
            self.average.update()
        position.step += 1
        position.tokens += batch.tokens * self.processes.count
        position.unlogged_steps += 1

    def _log(self) -> None:
        position = self.position
        summed_loss = float(self.processes.mean(self.step.summed_loss))  # the first look at the device
        self._check_finite()
        self._count_seconds()
        loss, smoothing = summed_loss / position.unlogged_steps, getattr(self.model, "label_smoothing", 0.0)
        tokens, seconds = position.tokens - self._logged[0], position.train_seconds - self._logged[1]
        record = {
            "step": position.step,
            "epoch": round(self.data.epoch_after(position.step), 4),
            "tokens": position.tokens,
            "loss": loss,
            # A smoothed loss gives no perplexity, and the plain loss would have to be computed as well.
            **({"label_smoothing": smoothing} if smoothing else {"perplexity": perplexity(loss)}),
            "lr": self._rate,
            "gradient_norm": float(self.step.gradient_norm),
            "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
            "seconds": round(position.total_seconds, 3),
        }
        self.step.summed_loss.zero_()
        position.unlogged_steps = 0
        self._logged = position.tokens, position.train_seconds
        if self.processes.is_first:
            self.keeper.log("train", record)
            self.reporter.trained(record)

    def _count_seconds(self) -> None:
        """Add the time since the clock was last read to that spent on training."""
        before, self._clock = self._clock, time.monotonic()
        self.position.train_seconds += self._clock - before

    def _validate(self) -> None:
        """Evaluate and keep the best weights."""
        self._check_finite()
        self._count_seconds()
        with self.average.in_place(), evaluating(self.model):
            if self.config.keep and self.processes.is_first:
                self.keeper.keep(weights_of(self.model, self.position), self.position.step, self.config.keep)
            if self.validate is None:
                self.position.best_step = self.position.step
                self._write("best", weights_of(self.model, self.position))
            else:
                self._judge(self.validate())
        self._clock = time.monotonic()  # validation is not training time

    def _judge(self, evaluation: Evaluation) -> None:
        """Keep the weights if they are the best; drop the learning rate, start averaging or end as the recipe says."""
        position, averaging, patience = self.position, self.recipe.averaging, self.config.early_stopping
        loss = self.processes.of_first(evaluation.loss, self.device)
        better = loss < position.best_loss and math.isfinite(perplexity(loss))
        if better:
            position.best_loss, position.best_step, position.stale_validations = loss, position.step, 0
            self._write("best", weights_of(self.model, position))
        else:
            position.stale_validations += 1
            if self.recipe.schedule.drops_after(position.stale_validations):
                position.plateau_drops += 1
                position.stale_validations = 0
        record = {
            "step": position.step,
            "tokens": position.tokens,
            "seconds": round(position.total_seconds, 3),
            "loss": loss,
            "perplexity": evaluation.perplexity,
            "best": better,
            **({"averaged_steps": self.average.steps} if self.average.running else {}),
        }
        if self.processes.is_first:
            self.keeper.log("valid", record)
            self.reporter.validated(record)
        earlier = position.validation_losses
        position.validation_losses = [*earlier, loss]
        waiting = isinstance(averaging, StalledAveragingConfig) and not self.average.running
        if waiting and stalled(earlier, loss, averaging.patience):
            self.average.start()
            position.validation_losses = []  # the average has a record of its own
        elif patience is not None and stalled(earlier, loss, patience):
            position.finished = True

    def _check_finite(self) -> None:
        bad = int(self.step.first_bad_step)
        if bad >= 0:
            place = self.data.batch(max(bad, 1) - 1).place
            what = f"The loss or its gradient stopped being finite at step {bad} ({place})"
        elif self.precision.scale_collapsed():
            what = f"The loss scale of fp16 collapsed by step {self.position.step}"
        else:
            return
        written = self.position.step >= self.config.checkpoint_every
        kept = "The last checkpoint is from before that" if written else "No checkpoint was written yet"
        raise Diverged(f"{what}. {kept}; {CURE}, or train.precision fp32.")

    def _write_last(self) -> None:
        self._check_finite()
        self._count_seconds()
        self._write("last", checkpoint_of(self.step, self.average, self.processes, self.position))

    def _write(self, which: Literal["last", "best"], checkpoint: Checkpoint) -> None:
        if self.processes.is_first:
            self.keeper.write(which, checkpoint)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a polite request; a second one acts at once, as usual."""
    asked = False  # no lock: a second signal may interrupt the handler of the first
    in_main = threading.current_thread() is threading.main_thread()  # other threads get no signals
    before: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM) if in_main}

    def ask(number: int, _: Any) -> None:
        nonlocal asked
        signal.signal(number, before[number])
        asked = True

    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
