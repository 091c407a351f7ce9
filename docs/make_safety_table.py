"""Write what the drills of results/drill tried into docs/safety.md: python docs/make_safety_table.py."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "safety.md", ROOT / "results" / "drill"
HEADS = ("what was tried", "cases", "refused", "failures", "longest", "most memory")


def row(name: str, parts: list[Mapping[str, Any]]) -> list[str]:
    """One kind of case, with all seeds together."""
    run = [part for part in parts if "not_run" not in part]
    if not run:
        return [f"{name} (not run)", *["—"] * (len(HEADS) - 1)]
    cases, refused = (sum(part[what] for part in run) for what in ("cases", "refusals"))
    failures, slowest = sum(len(part["failures"]) for part in run), max(part["slowest"] for part in run)
    missing = f" ({len(run)} of {len(parts)} seeds)" if len(run) < len(parts) else ""
    numbers = (f"{cases:,}", f"{refused:,}", f"{failures:,}", f"{slowest:.1f} s")
    return [name + missing, *numbers, f"{max(part['largest'] for part in run) / 2**20:,.0f} MiB"]


def table(drills: list[dict[str, Any]]) -> str:
    rows = [row(name, [drill["parts"][name] for drill in drills]) for name in drills[0]["parts"]]
    rows.append(row("**all**", [part for drill in drills for part in drill["parts"].values() if "not_run" not in part]))
    lines = [HEADS, ["---", *["---:"] * (len(HEADS) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def about(drills: list[dict[str, Any]]) -> str:
    seeds = ", ".join(str(drill["seed"]) for drill in drills)
    versions, hardware = drills[0]["versions"], drills[0]["hardware"]
    commits = sorted({(drill["commit"] or "unknown")[:12] for drill in drills})
    return (
        f"Seeds {seeds}, the last of them drawn; commit {', '.join(commits)}, torch {versions['torch']}, Python "
        f"{versions['python']}, {drills[0]['workers']} processes on {hardware['cpu']}:"
    )


def main() -> None:
    paths = sorted(RESULTS.glob("seed-*.json"), key=lambda path: int(path.stem.removeprefix("seed-")))
    drills = [json.loads(path.read_text()) for path in (*paths, RESULTS / "drawn.json")]
    written = f"{about(drills)}\n\n{table(drills)}\n"
    old = re.compile(r"(<!-- counts -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(old.sub(lambda match: f"{match[1]}{written}{match[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
