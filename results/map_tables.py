"""The correlation of dimensions in numbers, as results/look_at_maps.py wrote them."""

from __future__ import annotations

import json
from pathlib import Path

EXPLAINED = """\
The stage "map" is the table, "layer 1" and "layer 2" are the expansion layers of the unit, and "finished"
are the token vectors. In rows that say "centred", the mean of every dimension is subtracted first. "above
0.25" is the fraction of pairs of dimensions whose absolute cosine is above 0.25. The last column is the
mean absolute difference to the map of the standard table."""


def correlation_section(folder: Path) -> str:
    """What the maps of docs/maps.md show, in numbers: of the finished vectors, and along the unit."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    looked_at = {name: result for name, result in results.items() if "correlation" in result}
    if not looked_at:
        return ""
    header = (
        "run",
        "state",
        "stage",
        "dimensions",
        "mean abs. cosine",
        "above 0.25",
        "effective rank",
        "distance to standard",
    )
    lines = ["## Correlation of dimensions", "", EXPLAINED, "", "| " + " | ".join(header) + " |"]
    lines.append("|---|---|---|" + "---:|" * (len(header) - 3))
    for name, result in looked_at.items():
        for state, stages in result["correlation"].items():
            for stage, numbers in stages.items():
                if state.startswith("untrained") and stage != "finished":
                    continue
                distance = numbers.get("distance_to_standard")
                cells = [
                    name,
                    state,
                    stage,
                    str(numbers["dimensions"]),
                    f"{numbers['mean_off_diagonal']:.4f}",
                    f"{numbers['share_above_0.25']:.1%}",
                    f"{numbers['effective_rank']:.1f}",
                    f"{distance:.4f}" if distance is not None else "–",
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])
