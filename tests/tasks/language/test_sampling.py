import numpy as np
import pytest
import torch

from tests.tasks.language.test_model import adaptive_model
from torchdefine.errors import MachineError, UserError
from torchdefine.tasks.language import generate
from torchdefine.tasks.sampling import SamplingOptions, draw, draw_rows


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


def test_tokens_that_are_not_needed_to_reach_top_p_are_never_drawn() -> None:
    """Four equal tokens have a quarter each, exactly: the second is what reaches a half, and no third is needed."""
    equal, uniform = torch.full((64, 4), 0.25, dtype=torch.float64).log(), torch.arange(0, 1, 1 / 64).double()

    def seen(top_p: float) -> int:
        return len(draw_rows(equal, SamplingOptions(top_p=top_p), uniform).unique())

    assert [seen(top_p) for top_p in (0.25, 0.5, 0.75, 1.0)] == [1, 2, 3, 4]
    assert [seen(top_p) for top_p in (0.01, 0.26, 0.51, 0.76)] == [1, 2, 3, 4]


def test_neither_the_smallest_number_nor_the_largest_draws_what_has_no_probability() -> None:
    uniform = torch.tensor([0.0, 0.49, 0.5, 1 - 2**-53], dtype=torch.float64)
    halves = torch.tensor([0, 0.5, 0.5, 0], dtype=torch.float64).log().expand(4, 4)
    assert draw_rows(halves, SamplingOptions(), uniform).tolist() == [1, 1, 2, 2]
    quarters = torch.full((4, 4), 0.25, dtype=torch.float64).log()
    assert draw_rows(quarters, SamplingOptions(forbidden=(0, 3)), uniform).tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("forbidden", "message"),
    [
        (range(50), "All 50 tokens are forbidden"),
        ((3, 50), "forbidden token 50 is outside the vocabulary of 50"),
        ((-1,), "forbidden token -1 is outside"),
    ],
)
def test_what_cannot_be_forbidden_is_refused(forbidden, message: str, temperature: float) -> None:
    options = SamplingOptions(temperature, forbidden=tuple(forbidden))
    log_probs, model = torch.full((50,), 1 / 50).log(), adaptive_model()
    assert model.output.num_embeddings == 50
    for attempt in (
        lambda: draw(log_probs, options),
        lambda: draw_rows(log_probs.expand(2, 50), options, torch.rand(2)),
        lambda: generate(model, [1], 2, options),
    ):
        with pytest.raises(UserError, match=message):
            attempt()


def test_all_tokens_but_one_may_be_forbidden() -> None:
    options = SamplingOptions(forbidden=(0, 1, 3, 3, 1))
    assert {draw(torch.full((4,), 0.25).log(), options) for _ in range(20)} == {2}


def test_a_prompt_may_be_a_tensor_or_an_array() -> None:
    model, greedy = adaptive_model(), SamplingOptions(temperature=0)
    expected = generate(model, [1, 2], 4, greedy)
    assert generate(model, torch.tensor([1, 2]), 4, greedy) == expected
    assert generate(model, np.array([1, 2], dtype=np.int32), 4, greedy) == expected
    for empty in (torch.tensor([], dtype=torch.long), np.array([], dtype=np.int64)):
        with pytest.raises(UserError, match="prompt is empty"):
            generate(model, empty, 2)


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
