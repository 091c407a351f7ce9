"""Run every use on every class of tests/behaviour, and write the counts into docs/transformers.md.

python docs/make_transformers_table.py [--workers 2]
"""

import argparse
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "transformers.md"
sys.path.insert(0, str(ROOT))  # for the tests

import torch  # noqa: E402
import transformers  # noqa: E402
from tests.behaviour.models import CASES  # noqa: E402
from tests.behaviour.run import KINDS, outcome  # noqa: E402
from tests.behaviour.uses import USES  # noqa: E402

OUTCOMES = ("works", "refused", "no meaning")


def outcomes_of(name: str) -> list[tuple[str, str, str]]:
    """(use, kind, outcome) of one class."""
    torch.set_num_threads(1)
    found = [(use, kind, outcome(CASES[name], USES[use], kind)) for use in USES for kind in KINDS]
    print(name, flush=True)
    return found


def table(counts: Counter[tuple[str, str, str]]) -> str:
    heads = [f"{kind}: {how}" for kind in KINDS for how in OUTCOMES]
    rows = [["use", *heads], ["---", *(["---:"] * len(heads))]]
    for use in USES:
        rows.append([use, *(str(counts[use, kind, how] or "") for kind in KINDS for how in OUTCOMES)])
    sums = (str(sum(counts[use, kind, how] for use in USES)) for kind in KINDS for how in OUTCOMES)
    rows.append(["**all**", *sums])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    counts: Counter[tuple[str, str, str]] = Counter()
    with ProcessPoolExecutor(parser.parse_args().workers) as pool:
        for found in pool.map(outcomes_of, CASES):
            counts.update(found)
    about = f"{len(CASES)} classes, with transformers {transformers.__version__}:"
    text = re.sub(
        r"(<!-- counts -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{about}\n\n{table(counts)}\n{match[2]}",
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
