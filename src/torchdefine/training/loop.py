"""The training loop: one for every model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from torchdefine.data import TokenStreams
from torchdefine.errors import MachineError
from torchdefine.models import LanguageModel
from torchdefine.recipe import Recipe
from torchdefine.training.checkpoint import (
    Checkpoint,
    flat_tensors,
    load_weights,
    optimizer_tensors,
    read_checkpoint,
    restore_optimizer,
    write_checkpoint,
)
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluate import Evaluation, perplexity
from torchdefine.training.optimizers import make_optimizer
from torchdefine.training.precision import Precision
from torchdefine.training.progress import Reporter
from torchdefine.training.run_folder import RunFolder
from torchdefine.training.schedules import Schedule
from torchdefine.training.stopping import stop_requests


class Interrupted(MachineError):
    """Training was asked to stop; the checkpoint lets it go on."""


@dataclass
class Position:
    """Where a run stands: all that a checkpoint keeps beside tensors."""

    step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    total_seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    plateau_drops: int = 0
    stale_validations: int = 0


class Trainer:
    """Trains a model on token streams and keeps the run folder up to date.

    ``validate`` evaluates the current weights on the validation text, or is None where there is none.
    """

    def __init__(
        self,
        model: LanguageModel,
        streams: TokenStreams,
        recipe: Recipe,
        folder: RunFolder,
        validate: Callable[[], Evaluation] | None,
        processes: Processes,
        reporter: Reporter,
    ) -> None:
        self.model, self.streams, self.folder = model, streams, folder
        self.settings, self.optim = recipe.train, recipe.optim
        self.validate, self.processes, self.reporter = validate, processes, reporter
        self.device = next(model.parameters()).device
        self.precision = Precision(self.settings.precision, self.device)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, self.optim, self.device)
        self.step_module = processes.wrap(model)
        self.segments = streams.num_segments(self.settings.length)
        self.total_steps = self.settings.steps or math.ceil((self.settings.epochs or 0) * self.segments)
        drop_unit = 1.0 if self.settings.steps else float(self.segments)
        self.schedule = Schedule(recipe.schedule, self.total_steps, drop_unit)
        self.position = Position()
        self.carried = self._fresh_state()
        self._losses = torch.zeros((), device=self.device)
        self._gradient_norm = torch.zeros((), device=self.device)
        self._first_bad_step = torch.full((), -1, dtype=torch.long, device=self.device)
        self._steps_since_log = self._tokens_since_log = 0
        self._seconds_since_log = 0.0

    def resume(self) -> None:
        """Take up the run where its last checkpoint left it, or at its beginning if it has written none."""
        path = self.folder.last
        if not path.exists():
            if self.processes.is_first:
                self.folder.forget_after(-1)
            return
        checkpoint = read_checkpoint(path)
        self.folder.check_fingerprints(checkpoint.facts, path)
        load_weights(self.model, checkpoint, path)
        restore_optimizer(self.optimizer, checkpoint.under("optimizer"), checkpoint.facts["optimizer"])
        if checkpoint.facts["loss_scale"]:
            self.precision.scaler.load_state_dict(checkpoint.facts["loss_scale"])
        self.position = Position(**checkpoint.facts["position"])
        self._restore_process(checkpoint)
        if self.processes.is_first:
            self.folder.forget_after(self.position.step)

    def run(self) -> Position:
        """Train to the end, or raise ``Interrupted`` after writing a checkpoint."""
        self.model.train()
        self.reporter.started(self.position.step, self.total_steps)
        try:
            with stop_requests() as stop_asked, self.precision.matmul_mode():
                self._steps(stop_asked)
        finally:
            self.reporter.finished()
        return self.position

    def _steps(self, stop_asked: Callable[[], bool]) -> None:
        self._clock = time.monotonic()
        started = self._clock - self.position.total_seconds
        while self.position.step < self.total_steps:
            self._train_step()
            self.position.total_seconds = time.monotonic() - started
            step = self.position.step
            logging = step % self.settings.log_every == 0 or step == self.total_steps
            if logging:
                self._log()
            if self._validation_due():
                self._validate()
            elif step % self.settings.checkpoint_every == 0:
                self._write_last()
            if self._all_agree_to_stop(stop_asked(), logging):
                self._write_last()
                raise Interrupted(f"Stopped at step {step}; the same command with --resume goes on from there.")

    def _all_agree_to_stop(self, asked: bool, may_ask_others: bool) -> bool:
        """Several processes must stop at the same step, so they ask each other, and only when they log."""
        if self.processes.count == 1:
            return asked
        return may_ask_others and self.processes.any(asked, self.device)

    def _train_step(self) -> None:
        segment = self.position.step % self.segments
        if segment == 0:
            self.carried = self._fresh_state()
        rate = self.optim.lr * self.schedule.ratio(self.position.step, self.position.plateau_drops)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        start = segment * self.settings.length
        inputs, targets = self.streams.segment(start, self.settings.length)  # (B, T)
        host_targets = self.streams.host_targets(start, self.settings.length)
        parts = self.settings.accumulate
        share = inputs.shape[0] // parts
        self.optimizer.zero_grad(set_to_none=True)
        step_loss = torch.zeros((), device=self.device)
        for part in range(parts):
            rows = slice(part * share, (part + 1) * share)
            hint = self.model.host_hint(host_targets[rows])
            with self.precision.autocast():
                loss, self.carried[part] = self.step_module(inputs[rows], targets[rows], self.carried[part], hint=hint)
            self.precision.scaler.scale(loss / parts).backward()
            step_loss += loss.detach() / parts
        self._update(step_loss)
        tokens = targets.numel() * self.processes.count
        self.position.step += 1
        self.position.tokens += tokens
        self._tokens_since_log += tokens

    def _update(self, step_loss: Tensor) -> None:
        """Clip and step, and note on the device, without asking it, whether anything is not finite."""
        scaler = self.precision.scaler
        scaler.unscale_(self.optimizer)
        largest = math.inf if self.optim.clip is None else self.optim.clip
        norm = clip_grad_norm_(self.parameters, largest)
        scaler.step(self.optimizer)
        scaler.update()
        fine = step_loss.isfinite()
        if not scaler.is_enabled():  # loss scaling meets infinite gradients by design, and skips them
            fine = fine & norm.isfinite()
        first = (self._first_bad_step < 0) & ~fine
        self._first_bad_step = torch.where(first, self.position.step + 1, self._first_bad_step)
        self._losses += step_loss
        self._gradient_norm = norm.detach()
        self._steps_since_log += 1

    def _log(self) -> None:
        loss = float(self.processes.mean(self._losses)) / self._steps_since_log  # the first look at the device
        self._check_finite()
        self._count_seconds()
        speed = self._tokens_since_log / max(self._seconds_since_log, 1e-9)
        record = {
            "step": self.position.step,
            "epoch": round(self.position.step / self.segments, 4),
            "tokens": self.position.tokens,
            "loss": loss,
            "perplexity": perplexity(loss),
            "lr": self.optimizer.param_groups[0]["lr"],
            "gradient_norm": float(self._gradient_norm),
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.position.total_seconds, 3),
        }
        self._losses.zero_()
        self._steps_since_log = self._tokens_since_log = 0
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
        step, every = self.position.step, self.settings.eval_every or self.segments
        return step % every == 0 or step == self.total_steps

    def _validate(self) -> None:
        self._check_finite()
        self._count_seconds()
        if self.validate is None:
            self.position.best_step = self.position.step
            self._write_best()
        else:
            evaluation = self.validate()
            position = self.position
            better = evaluation.loss < position.best_loss
            if better:
                position.best_loss, position.best_step, position.stale_validations = evaluation.loss, position.step, 0
                self._write_best()
            else:
                position.stale_validations += 1
                if self.schedule.settings.kind == "plateau" and (
                    position.stale_validations > self.schedule.settings.patience
                ):
                    position.plateau_drops += 1
                    position.stale_validations = 0
            record = {
                "step": position.step,
                "tokens": position.tokens,
                "seconds": round(position.total_seconds, 3),
                "loss": evaluation.loss,
                "perplexity": evaluation.perplexity,
                "best": better,
            }
            if self.processes.is_first:
                self.folder.log("valid", record)
                self.reporter.validated(record)
        self._write_last()
        self._clock = time.monotonic()  # validation is no training time

    def _check_finite(self) -> None:
        bad = int(self._first_bad_step)
        collapsed = self.precision.scale_collapsed()
        if bad < 0 and not collapsed:
            return
        what = f"The loss or its gradient stopped being finite at step {bad}"
        if bad < 0:
            what = f"The loss scale of fp16 collapsed by step {self.position.step}"
        segment = (max(bad, 1) - 1) % self.segments
        kept = (
            f"The checkpoint in {self.folder.last.parent} is from before that"
            if self.folder.last.exists()
            else ("No checkpoint was written yet")
        )
        raise MachineError(
            f"{what} (segment {segment} of the epoch's {self.segments}, from token {segment * self.settings.length} of "
            f"every stream). {kept}; in a new run, try a smaller --optim.lr, a --schedule.warmup, a smaller "
            "--optim.clip, or --train.precision fp32."
        )

    def _fresh_state(self) -> list[Any]:
        rows = self.streams.batch_size // self.settings.accumulate
        return [self.model.initial_state(rows) for _ in range(self.settings.accumulate)]

    def _write_best(self) -> None:
        if self.processes.is_first:
            tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
            write_checkpoint(self.folder.best, tensors, {"position": asdict(self.position), **self.folder.fingerprints})

    def _write_last(self) -> None:
        self._check_finite()
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        optimizer, plain = optimizer_tensors(self.optimizer)
        tensors.update({f"optimizer.{name}": tensor for name, tensor in optimizer.items()})
        for name, tensor in self._process_tensors().items():
            for rank, everyones in enumerate(self.processes.gather(tensor)):
                tensors[f"process.{rank}.{name}"] = everyones
        facts = {
            "position": asdict(self.position),
            "optimizer": plain,
            "loss_scale": self.precision.scaler.state_dict(),
            "processes": self.processes.count,
            **self.folder.fingerprints,
        }
        if self.processes.is_first:
            write_checkpoint(self.folder.last, tensors, facts)

    def _process_tensors(self) -> dict[str, Tensor]:
        """What each process has of its own: carried state, random state, losses not yet logged."""
        tensors = {f"carried.{index}": tensor for index, tensor in enumerate(flat_tensors(self.carried))}
        tensors["random.cpu"] = torch.get_rng_state().to(self.device)
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device).to(self.device)
        tensors["losses"] = torch.stack((self._losses, self._losses.new_tensor(float(self._steps_since_log))))
        return tensors

    def _restore_process(self, checkpoint: Checkpoint) -> None:
        if checkpoint.facts["processes"] != self.processes.count:
            raise MachineError(
                f"The run was trained by {checkpoint.facts['processes']} processes and can go on with as many only, "
                f"not with {self.processes.count}."
            )
        own = checkpoint.under(f"process.{self.processes.rank}")
        for index, tensor in enumerate(flat_tensors(self.carried)):
            tensor.copy_(own[f"carried.{index}"])
        torch.set_rng_state(own["random.cpu"].cpu())
        if self.device.type == "cuda" and "random.cuda" in own:
            torch.cuda.set_rng_state(own["random.cuda"].cpu(), self.device)
        self._losses.copy_(own["losses"][0])
        self._steps_since_log = int(own["losses"][1])
