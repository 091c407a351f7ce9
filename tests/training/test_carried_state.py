"""Whatever tensors of a state share memory, a context model gets back what it returned."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdefine.embedding import StandardMap, TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.output import FullSoftmax
from torchdefine.tasks.language import LanguageModel
from torchdefine.training.cuda_graphs import copy_state, flat_tensors, own_copy
from torchdefine.training.precision import Precision
from torchdefine.training.step import Batch, Part, TrainingStep

V, WIDTH, ROWS = 50, 16, 4


class Carrying(nn.Module):
    """A context model whose state is made by one function and renewed by another."""

    def __init__(self, begin: Callable[["Carrying", int], Any], renew: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.input_dim = self.output_dim = WIDTH
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("nothing", torch.zeros(8, WIDTH))
        self.learned = nn.Parameter(torch.zeros(1, WIDTH))
        self.begin, self.renew = begin, renew

    def initial_state(self, batch_size: int) -> Any:
        return self.begin(self, batch_size)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        seen = sum(weight * tensor for weight, tensor in enumerate(flat_tensors(state), start=1))
        return self.mix(x) + seen.unsqueeze(1), self.renew(x[:, -1], state)


def same_zeros_twice(model: Carrying, rows: int) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(rows, WIDTH)
    return zeros, zeros


MODELS = {
    "the last two": (
        lambda model, rows: [torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)],
        lambda last, state: [last, state[0]],
    ),
    "exchanged": (
        lambda model, rows: {"a": torch.zeros(rows, WIDTH), "b": torch.ones(rows, WIDTH)},
        lambda last, state: {"a": state["b"], "b": state["a"] + last},
    ),
    "the same zeros twice": (same_zeros_twice, lambda last, state: (last, -last)),
    "part of a buffer": (lambda model, rows: model.nothing[:rows], lambda last, state: last),
    "one row for all": (lambda model, rows: torch.zeros(1, WIDTH).expand(rows, -1), lambda last, state: last),
}


def make_step(kind: str) -> TrainingStep:
    torch.manual_seed(0)
    table = StandardMap(V, WIDTH)
    model = LanguageModel(TokenEmbedding(table), Carrying(*MODELS[kind]), FullSoftmax(WIDTH, table))
    precision = Precision("fp32", torch.device("cpu"))
    parts = (model, model, torch.optim.SGD(model.parameters(), lr=0.0), precision)
    return TrainingStep(*parts, [ROWS], None, recorded=False)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_gets_the_state_that_it_gave(kind: str) -> None:
    step = make_step(kind)
    state = step.model.initial_state(ROWS)
    for index in range(5):
        ids = torch.randint(0, V, (ROWS, 9))
        inputs, targets = ids[:, :-1], ids[:, 1:]
        begins_text = index in (0, 3)
        if begins_text:
            state = step.model.initial_state(ROWS)
            assert torch.equal(step.model.context.nothing, torch.zeros(8, WIDTH))
        with torch.no_grad():
            losses, state = step.model(inputs, targets, state)
        step.summed_loss.zero_()
        step(Batch([Part((inputs, targets), targets.numpy())], 32, begins_text=begins_text), 0.0)
        torch.testing.assert_close(step.summed_loss, losses.cross_entropy)


def test_a_start_that_would_learn_is_refused() -> None:
    MODELS["learned"] = (lambda model, rows: model.learned.expand(rows, -1), lambda last, state: last)
    try:
        with pytest.raises(UserError, match="initial state requires a gradient"):
            make_step("learned")
    finally:
        del MODELS["learned"]


def test_a_copy_has_the_form_of_its_state_and_memory_of_its_own() -> None:
    pair = namedtuple("pair", "left right")
    zeros = torch.zeros(3)
    state = [pair(zeros, None), {"a": zeros, "b": (zeros, [])}]
    copy = own_copy(state)
    assert isinstance(copy[0], pair)
    assert copy[0].right is None
    assert list(copy[1]) == ["a", "b"]
    assert isinstance(copy[1]["b"], tuple)
    assert copy[1]["b"][1] == []
    assert len({tensor.data_ptr() for tensor in (zeros, *flat_tensors(copy))}) == 4


def test_parts_of_the_old_state_are_read_before_they_are_overwritten() -> None:
    held = [torch.arange(4.0), torch.arange(4.0, 8.0)]
    copy_state(held, [held[1], held[0].flip(0)])
    assert torch.equal(held[0], torch.arange(4.0, 8.0))
    assert torch.equal(held[1], torch.arange(4.0).flip(0))
    memory = torch.arange(6.0)
    copy_state([memory], [torch.cat((memory[2:], torch.zeros(2)))])
    assert torch.equal(memory, torch.tensor([2.0, 3, 4, 5, 0, 0]))
    with pytest.raises(ValueError, match="zip"):
        copy_state([memory], [memory, memory])
