import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdefine.data import SegmentPlan


@given(st.integers(1, 400), st.integers(1, 60), st.one_of(st.none(), st.integers(0, 5)))
def test_every_epoch_covers_the_rows_once(row_length: int, length: int, seed: int | None) -> None:
    plan = SegmentPlan(row_length, length, seed)
    step = 0
    for epoch in range(3):
        assert plan.epoch_after(step) == epoch
        expected = 0
        while expected < row_length:
            start, length_here = plan.segment(step)
            assert start == expected
            assert length_here >= 1
            expected += length_here
            step += 1
        assert expected == row_length
        assert plan.steps_in(epoch + 1) == step


def test_any_order_of_questions_gives_the_same_answers() -> None:
    steps = list(range(100))
    plan, shuffled = SegmentPlan(300, 20, 7), SegmentPlan(300, 20, 7)
    asked = {step: shuffled.segment(step) for step in np.random.default_rng(0).permutation(steps)}
    assert [plan.segment(step) for step in steps] == [asked[step] for step in steps]
    assert plan.segment(0) != SegmentPlan(300, 20, 8).segment(0)


def test_fixed_lengths_are_cut_as_always() -> None:
    plan = SegmentPlan(25, 10)
    assert [tuple(plan.segment(step)) for step in range(4)] == [(0, 10), (10, 10), (20, 5), (0, 10)]
    assert plan.steps_in(2.5) == 8
    assert [SegmentPlan(700, 70).steps_in(epochs) for epochs in (1.1, 2.1, 1.11)] == [11, 21, 12]
    assert plan.epoch_after(4) == pytest.approx(4 / 3)


def test_random_lengths_have_merity_s_distribution_and_differ_between_epochs() -> None:
    plan = SegmentPlan(2_000_000, 70, 1)
    steps = plan.steps_in(1)
    lengths = np.array([plan.segment(step)[1] for step in range(steps - 1)])
    halves = lengths < 52
    assert halves.mean() == pytest.approx(0.05, abs=0.01)
    assert lengths[~halves].mean() == pytest.approx(69.5, abs=0.3)  # cut down to whole numbers
    assert lengths[~halves].std() == pytest.approx(5, abs=0.2)
    assert lengths[halves].mean() == pytest.approx(34.5, abs=1)
    first, second = ([plan.segment(step)[1] for step in range(s, s + 50)] for s in (0, steps))
    assert first != second
    assert SegmentPlan(100_000, 5, 1).segment(3)[1] >= 5
