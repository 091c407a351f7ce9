import pytest
import torch
from tests.models.test_language_model import adaptive_model

from torchdefine.decoding import SamplingOptions, generate
from torchdefine.decoding.sampling import draw
from torchdefine.errors import MachineError, UserError


def test_greedy_generation_equals_recomputing_the_whole_text() -> None:
    model = adaptive_model().double()
    continuation = generate(model, [3, 7], 12, SamplingOptions(temperature=0))
    text = [3, 7]
    model.eval()
    for token in continuation:
        log_probs, _ = model.log_prob(torch.tensor([text]), model.initial_state(1))
        assert int(log_probs[0, -1].argmax()) == token
        text.append(token)
    assert len(continuation) == 12


def test_same_seed_same_text_and_stop_token() -> None:
    model = adaptive_model()
    one = generate(model, [1], 20, generator=torch.Generator().manual_seed(5))
    two = generate(model, [1], 20, generator=torch.Generator().manual_seed(5))
    other = generate(model, [1], 20, generator=torch.Generator().manual_seed(6))
    assert one == two != other
    stop = one[3]
    assert generate(model, [1], 1, generator=torch.Generator().manual_seed(5)) == one[:1]
    cut = generate(model, [1], 20, generator=torch.Generator().manual_seed(5), stop_token=stop)
    assert cut == one[: one.index(stop) + 1]
    assert model.training


def test_draws_follow_the_options() -> None:
    log_probs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def seen(**options) -> set[int]:
        return {draw(log_probs, SamplingOptions(**options)) for _ in range(300)}

    assert seen() == {0, 1, 2, 3}
    assert seen(top_k=2) == {0, 1}
    assert seen(top_p=0.6) == {0, 1}
    assert seen(top_p=0.5) == {0}
    assert seen(top_k=4) == seen(top_p=1.0) == {0, 1, 2, 3}
    assert seen(forbidden=(0, 2)) == {1, 3}
    assert seen(temperature=0) == {0}


def test_a_draw_leaves_the_probabilities_as_they_are() -> None:
    log_probs = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    before = log_probs.clone()
    assert draw(log_probs, SamplingOptions(temperature=0, forbidden=(0,))) == 1
    assert torch.equal(log_probs, before)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    log_probs = torch.tensor([0.7, 0.2, 0.1]).log()
    draws = torch.tensor([draw(log_probs, SamplingOptions(temperature)) for _ in range(4000)])
    expected = (log_probs / temperature).softmax(-1)
    torch.testing.assert_close(torch.bincount(draws) / 4000, expected, atol=0.03, rtol=0)


def test_bad_options() -> None:
    for message, make in {
        "temperature is -1": lambda: SamplingOptions(temperature=-1),
        "top_k is 0": lambda: SamplingOptions(top_k=0),
        "temperature is inf": lambda: SamplingOptions(temperature=float("inf")),
        "top_p is 0": lambda: SamplingOptions(top_p=0),
        "top_p is 1.01": lambda: SamplingOptions(top_p=1.01),
        "prompt is empty": lambda: generate(adaptive_model(), [], 3),
        "length is 0": lambda: generate(adaptive_model(), [1], 0),
    }.items():
        with pytest.raises(UserError, match=message):
            make()


def test_of_equals_no_more_are_drawn_from_than_were_asked_for() -> None:
    log_probs = torch.full((5,), 0.2).log()
    assert len({draw(log_probs, SamplingOptions(top_k=2)) for _ in range(200)}) == 2


def test_nothing_is_drawn_from_what_is_no_number() -> None:
    with pytest.raises(MachineError, match="gives no token a probability"):
        draw(torch.tensor([0.0, torch.nan]), SamplingOptions())
