"""Every use on every class: it does what it does to the plain model, or is refused in a sentence."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.behaviour.models import CASES, QUICK
from tests.behaviour.run import KINDS, outcome
from tests.behaviour.uses import USES

CLASSES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", CLASSES)
def test_every_use_of_every_class(name: str, use: str) -> None:
    for kind in KINDS:
        assert outcome(CASES[name], USES[use], kind) in ("works", "refused", "no meaning")


def test_there_are_enough() -> None:
    assert len(CASES) >= 40
    assert len(QUICK) == 6
