"""What input vectors cost when they are computed, cached and compressed: the tables of results/inference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from provenance import short_commit


def look_up_section(folder: Path) -> str:
    """What input vectors cost when they are computed, cached and compressed."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), reverse=True)]
    header = ("recipe", "table", "vectors", "MB", "variance lost", "by frequency", "test", "ms/batch", "look-up ms")
    lines = ["## Looking vectors up", "", "| " + " | ".join(header) + " |", "|---|---:|---" + "|---:" * 6 + "|"]
    for result in results:
        for made in result["rows"]:
            cells = ["not run"] * 6
            if "not_run" not in made:
                cells = [
                    f"{made['bytes'] / 1e6:.2f}",
                    *(f"{made[name]:.2%}" for name in ("lost", "lost_by_frequency")),
                    *(f"{made[name]:.2f}" for name in ("perplexity", "ms_per_batch")),
                    f"{made['look_up_ms']:.3f}",
                ]
            lines.append(
                "| " + " | ".join([f"`{result['recipe']}`", str(result["map_dim"]), made["name"], *cells]) + " |"
            )
    lines += [
        "",
        '"computed" needs the map and the unit; the other rows need only the bytes listed. A tied output layer always '
        "needs the map. codes, product-codes, svd and bits have equal bytes. The bytes of torchao's int4 count packed "
        'numbers; in memory they are not packed. "by frequency" weights a token by its count to the power of ¾. '
        "A look-up is of 9,000 tokens at once. The time of a whole batch depends on how fast the host launches "
        f"kernels, so it varies by chance: {_apart_by_chance(results)}",
        "",
        *(_codes_beside_k_means(result) for result in results if "product-codes" in _names(result)),
        "",
    ]
    for result in results:
        training, hardware = result["training"], result["hardware"]
        lines.append(
            f"- `{result['recipe']}`: {training['steps']:,} steps, {training['tokens'] / 1e6:.1f} M tokens of "
            f"{training['data']['corpus']} in {training['seconds']:.0f} s; {result['protocol']}; timed on "
            f"{result['timed']}, {hardware.get('gpu') or hardware['cpu']}, "
            f"commit {short_commit(result['commit'])}."
        )
    return "\n".join([*lines, ""])


def _apart_by_chance(results: list[dict[str, Any]]) -> str:
    """Two rows of a standard table do the same work: it is its own cache."""
    apart = []
    for result in results:
        rows = {row["name"]: row for row in result["rows"]}
        if "standard" in result["recipe"]:
            times = sorted(rows[name]["ms_per_batch"] for name in ("computed", "cached, float32"))
            apart.append(
                f"{times[0]:.1f} and {times[1]:.1f} ms for the same work, a standard table computed and cached"
            )
    return "; ".join(apart) + "." if apart else "no row shows how much."


def _names(result: dict[str, Any]) -> set[str]:
    return {row["name"] for row in result["rows"]}


def _codes_beside_k_means(result: dict[str, Any]) -> str:
    rows = {row["name"]: row for row in result["rows"]}
    codes, means = rows["codes 32 × 16"], rows["product-codes"]
    if "not_run" in codes or "not_run" in means:
        return f"- `{result['recipe']}`: learned codes and product quantisation by K-means were not both run."
    word = "less" if codes["lost"] < means["lost"] else "more"
    return (
        f"- `{result['recipe']}`: at equal bytes, learned codes lose {word} of the variance than product quantisation "
        f"by K-means ({codes['lost']:.1%} against {means['lost']:.1%}; by frequency {codes['lost_by_frequency']:.1%} "
        f"against {means['lost_by_frequency']:.1%}). Their perplexity is {codes['perplexity']:.2f} against "
        f"{means['perplexity']:.2f}."
    )
