"""Optimisers by name, and those of tables whose gradients are sparse."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from torchdefine.config import Config, Kinds, setting
from torchdefine.errors import UserError


@dataclass(frozen=True)
class OptimizerConfig(Config):
    """What every optimiser has.

    All are fused: one pass over memory on a CPU; on a GPU one launch, without a host synchronisation.
    """

    kind: str = ""
    lr: float = setting(20.0, "Learning rate.", above=0)
    weight_decay: float = setting(0.0, "Weight decay.", at_least=0)
    clip: float | None = setting(0.25, "Largest norm of the gradient; with none, gradients are not clipped.", above=0)
    sparse: Literal["none", "sparse-adam", "rowwise-adagrad"] = setting(
        "none",
        "Optimiser of the embedding's tables, with sparse gradients: the cost of a step depends on its batch, not on "
        "the vocabulary. sparse-adam changes neither unused rows nor their moments. none: tables are trained densely.",
    )
    sparse_lr: float | None = setting(
        None, "Learning rate of the tables with sparse gradients; by default lr.", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparse == "none":
            self.require(self.sparse_lr is None, "sparse_lr is set, but sparse is none: set sparse, or leave it out.")
        else:
            problem = "weight_decay changes every row of a table in every step, but sparse leaves unused rows alone"
            self.require(not self.weight_decay, f"{problem}: set weight_decay to 0, or sparse to none.")

    def check_sparse(self, output_tied: bool, compiled: bool) -> None:
        """Refuse, before any text is read, what does not go with sparse gradients."""
        if self.sparse == "none":
            return
        name = f"optim.sparse {self.sparse}"
        if output_tied:
            problem = f"{name} needs tables that are only looked up, but a tied output layer reads all of their rows"
            raise UserError(f"{problem}: set output.tied to none, or optim.sparse to none.")
        if compiled:
            problem = f"{name} needs sparse gradients, which torch.compile does not have"
            raise UserError(f"{problem}: set train.compile to false, or optim.sparse to none.")

    def build_with_tables(
        self, parameters: Iterable[nn.Parameter], tables: Sequence[nn.Parameter], device: torch.device
    ) -> torch.optim.Optimizer:
        """The optimiser of all parameters; ``tables`` are those of them whose gradients are sparse."""
        if not tables:
            return self.build(parameters, device)
        own = set(tables)
        rest = self.build([p for p in parameters if p not in own], device)
        rate = self.sparse_lr or self.lr
        if self.sparse == "rowwise-adagrad":
            return RestAndTables(rest, RowwiseAdagrad(tables, rate), rate / self.lr)
        betas = getattr(self, "beta1", 0.9), getattr(self, "beta2", 0.999)
        return RestAndTables(rest, torch.optim.SparseAdam(tables, rate, betas), rate / self.lr)

    @abstractmethod
    def build(self, parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
        raise NotImplementedError

    def _shared(self, device: torch.device) -> dict[str, Any]:
        """On a GPU the learning rate is a tensor, so that a CUDA graph of a step uses the current one."""
        rate = torch.tensor(self.lr, device=device) if device.type == "cuda" else self.lr
        return {"lr": rate, "weight_decay": self.weight_decay, "fused": True}


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    kind: str = "sgd"
    momentum: float = setting(0.0, "Momentum.", at_least=0, below=1)

    def build(self, parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, momentum=self.momentum, **self._shared(device))


@dataclass(frozen=True)
class AdamConfig(OptimizerConfig):
    """Adam; as adamw with decoupled weight decay."""

    kind: str = "adam"
    lr: float = setting(1e-3, "Learning rate.", above=0)
    beta1: float = setting(0.9, "β₁.", at_least=0, below=1)
    beta2: float = setting(0.999, "β₂.", at_least=0, below=1)

    def build(self, parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.kind == "adamw" else torch.optim.Adam
        on_gpu = device.type == "cuda"
        return kind(parameters, betas=(self.beta1, self.beta2), capturable=on_gpu, **self._shared(device))


OPTIMIZERS = Kinds("optimiser", SGDConfig, AdamConfig)
OPTIMIZERS.register(AdamConfig, "adamw")


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one number a row, the sum of its gradients' mean squares; for sparse gradients alone.

    Rows without a gradient stay as they are, as in Adagrad. Its state is V numbers, where Adam's is 2 × V × n.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, group["lr"], group["eps"])
        return loss

    def _update(self, table: nn.Parameter, lr: float, eps: float) -> None:
        assert table.grad is not None
        if not table.grad.is_sparse:
            raise UserError(
                "Row-wise Adagrad takes sparse gradients, but a table has a dense one: set its map's sparse to True, "
                "and let nothing but its look-up read it."
            )
        state = self.state[table]
        if not state:
            state["sum"] = table.new_zeros(len(table))  # (V,)
        gradient = table.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()  # (U,) different ones, (U, n)
        sums = state["sum"].index_add_(0, rows, values.square().mean(1))[rows]  # (U,)
        table.index_add_(0, rows, values * (-lr / (sums.sqrt() + eps)).unsqueeze(1))


class RestAndTables(torch.optim.Optimizer):
    """Two optimisers as one: that of the tables with sparse gradients, and that of all other parameters.

    ``ratio`` is the learning rate of the tables, as a multiple of the other one: TrainingStep sets both.
    """

    def __init__(self, rest: torch.optim.Optimizer, tables: torch.optim.Optimizer, ratio: float) -> None:
        self.parts = (rest, tables)
        for group in tables.param_groups:
            group["ratio"] = ratio
        super().__init__([*rest.param_groups, *tables.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Both parts work on this optimiser's groups and state, which are saved and restored as one."""
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:stop], self.state
            start = stop

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.parts[0].step(closure)
        self.parts[1].step()
        return loss


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """``clip_grad_norm_``, for sparse gradients too: the norm is that of the same gradients as dense tensors."""
    holders: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.is_sparse:
            holders.append(parameter)
        else:
            parameter.grad = parameter.grad.coalesce()
            values = parameter.grad.values()
            holders.append(values.detach())
            holders[-1].grad = values  # in the same memory
    return clip_grad_norm_(holders, most)
