"""What a language model asks of its context model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

State = Any
"""What a context model carries from one segment to the next; tensors in lists, tuples or dicts."""


class ContextModel(Protocol):
    """Vectors → vectors in context."""

    input_dim: int
    output_dim: int

    def initial_state(self, batch_size: int) -> State:
        """The state at the start of a text; nothing of it is learned."""

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]: ...


class StateTensor(NamedTuple):
    """A tensor of a context model's state, as an exported program calls it."""

    name: str
    below: int = 1
    """Whole numbers must be smaller than this."""


class SteppingModel(ContextModel, Protocol):
    """A context model that can be generated from fast, and exported."""

    step_length: int | None
    """How many positions ``step`` takes; None: any number."""
    step_notes: Sequence[str]
    """What whoever calls an exported step must know."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """What the model itself gives in evaluation, in operations of torch that can be traced and exported."""

    def state_tensors(self) -> list[StateTensor]:
        """The tensors of its state, in order."""
