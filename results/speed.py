"""How fast a run trained once it was under way."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

LEAST_STRETCHES = 5


def training_speed(result: dict[str, Any]) -> float:
    """Tokens a second: the median over the stretches between two log lines in which nothing was validated.

    The whole run's would have compiling in it, which takes the longer the fewer runs came before on a machine.
    """
    validated = [point["step"] for point in result.get("curve", [])]
    stretches = [
        (later["tokens"] - earlier["tokens"]) / (later["seconds"] - earlier["seconds"])
        for earlier, later in pairwise(result.get("train_curve", []))
        if later["seconds"] > earlier["seconds"]
        and not any(earlier["step"] <= step < later["step"] for step in validated)
    ]
    return median(stretches) if len(stretches) >= LEAST_STRETCHES else result["tokens_per_second"]
