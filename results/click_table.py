"""The click model of examples/: writes results/click-model/*.json, and from them the table of docs/large-tables.md.

python results/click_table.py --run 0 1 2     # seeds; a minute each on two cores
python results/click_table.py                 # the table alone, as `make results` does
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
from pathlib import Path
from typing import Any

import torch
from marked import write_between_marks
from provenance import short_commit

from torchdefine.files import write_json
from torchdefine.run.environment import describe_environment

HERE = Path(__file__).parent
FOLDER, PAGE = HERE / "click-model", HERE.parent / "docs" / "large-tables.md"


def run(seed: int) -> None:
    example = runpy.run_path(str(HERE.parent / "examples" / "click_model.py"))
    found = example["main"](["--seed", str(seed)])
    environment = describe_environment(torch.device("cpu"))
    write_json(FOLDER / f"seed-{seed}.json", {"format_version": 1, "seed": seed, **environment, "results": found})


def click_table(records: list[dict[str, Any]]) -> str:
    lines = ["| | rows | bytes | AUC |", "|---|---:|---:|---:|"]
    for name, first in records[0]["results"].items():
        reached = [record["results"][name]["AUC"] for record in records]
        spread = f" ({min(reached):.3f}–{max(reached):.3f})" if len(reached) > 1 else ""
        mean = statistics.mean(reached)
        lines.append(f"| {name} | {first['rows']:,} | {first['bytes']:,} | {mean:.3f}{spread} |")
    seeds = f"{len(records)} seeds, mean and range" if len(records) > 1 else "one seed"
    return "\n".join([*lines, "", f"{seeds.capitalize()}; commit {short_commit(records[0]['commit'])}."])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, nargs="+", default=[], metavar="SEED")
    for seed in parser.parse_args(arguments).run:
        run(seed)
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    write_between_marks(PAGE, "click model", click_table(records))


if __name__ == "__main__":
    main()
