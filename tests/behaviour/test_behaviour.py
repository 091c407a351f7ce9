"""Every use on every class: it does what it does to the plain model, or is refused in a sentence."""

import re
from pathlib import Path

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
        outcome(CASES[name], USES[use], kind)  # which fails unless it works, is refused, or has no meaning


def test_the_page_counts_these() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    assert f"{len(CASES)} classes" in page
    counts = dict(re.findall(r"^\| ([^*|]+?) \| ([\d |]+) \|$", page, re.MULTILINE))
    assert list(counts) == list(USES)
    for row in counts.values():
        assert sum(int(number or 0) for number in row.replace(" ", "").split("|")) == len(CASES) * len(KINDS)
