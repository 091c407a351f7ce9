import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapt.small_encoder import Encoder, behaviour, counts
from torchdefine.adapt import Distillation, FitOptions, distill, fit
from torchdefine.adapt.fitted import Measured, front_of
from torchdefine.errors import MachineError, UserError
from torchdefine.files import Progress
from torchdefine.tables import CodeLearning, CompactTable, UnitFitting, load_table

SHORT = UnitFitting(steps=20, batch_size=64)
FAST: dict[str, Any] = {
    "settings": {
        "define": {"training": SHORT},
        "mlp": {"training": SHORT},
        "codes": {"training": CodeLearning(steps=30, rounds=1)},
    }
}


@pytest.fixture(scope="module")
def fitted():
    model = Encoder()
    options = FitOptions(
        quality=behaviour(model, seed=3).similarity,
        quality_name="mean cosine",
        sensitivity=behaviour(model, 40, seed=4).sensitivity(),
        polish=lambda table, progress: distill(
            behaviour(model, 20, seed=5), table, Distillation(steps=30, lr=3e-3), progress
        ),
        **FAST,
    )
    return fit(model.tokens, counts(), "9KB", options=options)


def test_every_method_is_tried_and_keeps_to_the_budget(fitted) -> None:
    assert {one.method for one in fitted.measured} == {
        *("bits", "svd", "frequent", "group-reduce", "int", "slim", "define", "mlp", "codes")
    }
    assert all(one.bytes <= 9_000 for one in fitted.measured)
    assert all(0 < one.table_error < 1.5 and -1 <= one.quality <= 1 for one in fitted.measured)


def test_the_best_by_quality_is_chosen_and_says_why(fitted) -> None:
    assert fitted.chosen.quality == max(one.quality for one in fitted.measured)
    assert fitted.table.stored_bytes == fitted.chosen.bytes
    assert fitted.chosen.name in fitted.why
    assert fitted.why.endswith(".")
    front = fitted.front
    assert [one.bytes for one in front] == sorted(one.bytes for one in front)
    assert [one.quality for one in front] == sorted(one.quality for one in front)
    assert front[-1] == fitted.chosen


def test_the_front_has_nothing_that_something_smaller_equals() -> None:
    def measured(name: str, size: int, quality: float) -> Measured:
        return Measured("a family", name, size, size // 4, quality, 1 - quality, 0.0)

    good, same_but_larger, better = measured("good", 100, 0.8), measured("same", 200, 0.8), measured("better", 300, 0.9)
    worse, worse_of_its_size = measured("worse", 400, 0.7), measured("worse of its size", 100, 0.5)
    twin = measured("twin", 300, 0.9)
    assert front_of([worse, twin, same_but_larger, worse_of_its_size, good, better]) == [good, twin]
    assert front_of([worse, same_but_larger, worse_of_its_size, good, better]) == [good, better]
    assert front_of([]) == []


def test_polishing_is_measured_beside_the_rest(fitted) -> None:
    assert sum(one.name.endswith("distilled") for one in fitted.measured) == 1


def test_progress_grows_to_its_total() -> None:
    calls: list[tuple[int, int]] = []

    def polish(table: CompactTable, progress: Progress) -> None:
        for step in range(4):
            progress(step + 1, 4)

    options = FitOptions(methods=("int", "mlp"), polish=polish, **FAST)
    fit(Encoder().tokens, counts(), "9KB", options=options, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1]
    assert len(calls) == 9  # each reports while it works
    assert len(set(done[-5:-1])) == 4  # distillation too


def test_is_printed_drawn_saved_and_described(fitted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted.print()
    printed = capsys.readouterr().out
    assert "bits by importance" in printed
    assert "was chosen" in " ".join(printed.split())
    fitted.draw(tmp_path / "front.svg")
    assert (tmp_path / "front.svg").read_text().startswith("<?xml")
    described = json.loads(json.dumps(fitted.to_dict()))
    assert described["chosen"] == fitted.chosen.name
    assert any(one["on_front"] for one in described["candidates"])
    fitted.table.save(tmp_path / "table.safetensors")
    ids = torch.arange(400)
    assert torch.equal(load_table(tmp_path / "table.safetensors")(ids), fitted.table(ids))


def test_without_a_model_the_weighted_error_decides() -> None:
    made = fit(Encoder().tokens, counts(), 8_000, options=FitOptions(methods=("bits", "int"), **FAST))
    assert made.chosen.quality == pytest.approx(1 - made.chosen.table_error)
    assert {one.method for one in made.measured} == {"bits", "int"}
    assert made.chosen == max(made.measured, key=lambda one: one.quality)
    assert all(one.bytes <= 8_000 for one in made.measured)


def test_a_budget_of_parameters_packs_nothing() -> None:
    made = fit(Encoder().tokens, counts(), "5k parameters", options=FitOptions(**FAST))
    assert all(one.values <= 5_000 for one in made.measured)
    floats = [tensor for tensor in made.table.state_dict().values() if tensor.is_floating_point()]
    assert all(tensor.dtype == torch.float32 for tensor in floats)


def test_a_polish_that_harms_is_undone() -> None:
    def harm(table, progress) -> None:
        with torch.no_grad():
            table.mean += 10

    options = FitOptions(methods=("int",), polish=harm)
    made = fit(Encoder().tokens, counts(), 8_000, options=options)
    assert not made.chosen.name.endswith("distilled")
    assert made.table.mean.abs().max() < 5


def test_a_polish_that_overflows_loses_nothing() -> None:
    def overflow(table, progress) -> None:
        with torch.no_grad():
            table.mean += 10
        raise MachineError("The loss is no longer finite.")

    made = fit(Encoder().tokens, counts(), 8_000, options=FitOptions(methods=("int",), polish=overflow))
    assert made.skipped[-1].name == f"{made.chosen.name}, distilled"
    assert made.table.mean.abs().max() < 5


def test_a_quality_that_is_no_number_never_wins() -> None:
    answers = iter([math.nan])
    options = FitOptions(methods=("int", "bits"), quality=lambda table: next(answers, 0.9))
    made = fit(Encoder().tokens, counts(), 8_000, options=options)
    assert made.chosen.quality == 0.9
    assert "quality is nan" in made.skipped[0].reason
    with pytest.raises(UserError, match=r"The first of \d+ candidates, .*, failed: .* is nan"):
        fit(Encoder().tokens, counts(), 8_000, options=FitOptions(quality=lambda table: math.nan, **FAST))


def test_a_polish_after_which_nothing_can_be_measured_is_undone() -> None:
    answers = iter([0.5])
    options = FitOptions(
        methods=("int",), quality=lambda table: next(answers, math.nan), polish=lambda table, progress: None
    )
    made = fit(Encoder().tokens, counts(), 8_000, options=options)
    assert math.isfinite(made.chosen.quality)
    assert all(math.isfinite(one.quality) for one in made.measured)
    assert made.skipped[-1].name.endswith("distilled")


@pytest.mark.parametrize(("budget", "unit"), [("200B", "B"), ("50 parameters", " parameters")])
@pytest.mark.parametrize("methods", [FitOptions().methods, ("int", "svd"), ("bits", "svd")])
def test_a_budget_that_is_too_small_is_told_how_much_would_do(budget: str, unit: str, methods: tuple[str, ...]) -> None:
    options = FitOptions(methods=methods, **FAST)
    with pytest.raises(UserError, match=r"^(200 bytes|5e-05 M parameters .*) is too little for any .*: allow ") as said:
        fit(Encoder().tokens, counts(), budget, options=options)
    (enough,) = re.findall(rf"allow ([\d,]+){unit} or more", str(said.value))
    made = fit(Encoder().tokens, counts(), f"{enough}{unit}".replace(",", ""), options=options)
    assert made.chosen.bytes <= made.budget.bytes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"budget": 100}, r"100 bytes is too little .*: allow 2528B or more"),
        ({"budget": "many"}, "not a size"),
        ({"budget": "1GB"}, "1 GB are no less than the 51.2 KB of the table itself: allow less"),
        ({"options": FitOptions(methods=("quantised",))}, "The method 'quantised' is unknown"),
        ({"options": FitOptions(sensitivity=torch.eye(5))}, r"\(5, 5\)"),
        ({"options": FitOptions(sensitivity=torch.zeros(32, 32))}, "a diagonal without positive values"),
        ({"options": FitOptions(sensitivity=torch.full((32, 32), torch.nan))}, "not finite"),
        ({"options": FitOptions(methods=())}, "methods is empty"),
        ({"counts": [1, 2, 3]}, "3 counts for 400 rows"),
        ({"table": torch.full((400, 32), torch.nan)}, "not finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(arguments, sentence: str) -> None:
    settings = {"table": Encoder().tokens, "counts": counts(), "budget": 8_000} | arguments
    with pytest.raises(UserError, match=sentence):
        fit(**{"options": FitOptions(methods=("bits", "int"))} | settings)
