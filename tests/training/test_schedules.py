import math
from pathlib import Path

import pytest

from torchdefine import train
from torchdefine.errors import UserError
from torchdefine.training import SCHEDULES


def ratios(total: int = 100, unit: float = 1.0, **settings) -> list[float]:
    schedule = SCHEDULES.read(settings, "schedule")
    return [schedule.ratio(step, total, unit) for step in range(total)]


def test_constant_with_warmup() -> None:
    rates = ratios(warmup=10)
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert set(rates[10:]) == {1.0}


def test_a_warmup_that_outlasts_the_training_is_told_of(
    recipe_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="torchdefine")
    train(recipe_file, out=tmp_path / "in-time", train={"steps": 5}, schedule={"warmup": 5})
    assert "warm-up" not in caplog.text
    for number, kind in enumerate(("constant", "cosine")):
        caplog.clear()
        train(recipe_file, out=tmp_path / kind, train={"steps": 5}, schedule={"kind": kind, "warmup": 6 + number})
        assert f"The warm-up takes {6 + number} steps, but training ends after 5, so the learning rate" in caplog.text


def test_drops_count_in_their_unit() -> None:
    rates = ratios(kind="drops", drops=(1, 3), factor=10, unit=25.0)
    assert rates[24] == 1
    assert rates[25] == pytest.approx(0.1)
    assert rates[74] == pytest.approx(0.1)
    assert rates[75] == pytest.approx(0.01)


def test_what_falls_begins_after_its_warmup() -> None:
    linear = ratios(kind="linear", warmup=20)
    assert linear[:20] == pytest.approx([0.05 * i for i in range(1, 21)])
    assert linear[20] == 1
    assert linear[60] == pytest.approx(0.5)


def test_cosine_and_linear_reach_their_final_rate() -> None:
    cosine = ratios(kind="cosine", final_ratio=0.1)
    assert cosine[0] == 1
    assert cosine[25::25] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * at)) / 2 for at in (0.25, 0.5, 0.75)])
    linear = ratios(kind="linear", decay_from=0.5, final_ratio=0.0)
    assert set(linear[:51]) == {1.0}
    assert linear[75] == pytest.approx(0.5)
    assert linear[99] == pytest.approx(0.02)
    for kind in ("cosine", "linear"):
        ended = SCHEDULES.read({"kind": kind, "final_ratio": 0.1})
        assert ended.ratio(100, 100) == ended.ratio(150, 100) == pytest.approx(0.1)


def test_plateau_goes_by_stalled_validations() -> None:
    schedule = SCHEDULES.read({"kind": "plateau", "factor": 4})
    assert [schedule.ratio(5, 100, 1.0, drops) for drops in (0, 1, 2)] == [1, 0.25, 0.0625]
    assert schedule.ratio(5, 100) == 1


def test_noam_is_the_published_formula() -> None:
    rates = ratios(total=50, kind="noam", warmup=10, noam_width=64)
    expected = [64**-0.5 * min(s**-0.5, s * 10**-1.5) for s in range(1, 51)]
    assert rates == pytest.approx(expected)
    assert max(rates) == rates[9] == pytest.approx((64 * 10) ** -0.5)
    with pytest.raises(UserError, match=r"schedule\.warmup is 0, but must be at least 1"):
        SCHEDULES.read({"kind": "noam", "warmup": 0}, "schedule")


def test_cycles_rise_and_fall_each_lower_than_the_one_before() -> None:
    rates = ratios(total=40, kind="cyclic", cycles=4, decay=0.5, final_ratio=0.1)
    assert rates[::10] == pytest.approx([0.1] * 4)
    assert rates[5::10] == pytest.approx([1, 0.5, 0.25, 0.125])
    assert rates[2:10:6] == pytest.approx([0.1 + 0.9 * 0.4] * 2)
    assert ratios(total=40, kind="cyclic", cycles=6, decay=0.1, final_ratio=0.3)[-1] == pytest.approx(0.3)
