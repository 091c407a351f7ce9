"""Measure ways of packing token tables at equal bytes: a JSON for each table and method in results/leaderboard.

    python -m leaderboard --inputs FOLDER                     # every table whose files are in FOLDER
    python -m leaderboard minilm --inputs FOLDER              # some of them
    python -m leaderboard minilm --inputs FOLDER --again      # drop the rows of all methods, and measure them anew
    python -m leaderboard minilm --inputs FOLDER --again bits distilled

A row that its file has is not measured again, so an ended command goes on when it is given again, without --again.
`make results` writes the tables. Which files FOLDER needs is printed where one is missing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from leaderboard.measuring import measure
from leaderboard.methods import all_methods
from leaderboard.tables import PLACES
from torchdefine.errors import MachineError, UserError
from torchdefine.spelling import did_you_mean
from torchdefine.tables import Budget

OUT = Path(__file__).parent.parent / "results" / "leaderboard"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m leaderboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"some of {', '.join(PLACES)}; without, all")
    parser.add_argument("--inputs", type=Path, required=True, metavar="FOLDER", help="files that tables need, or links")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help=f"some of {', '.join(all_methods())}")
    parser.add_argument(
        "--again", nargs="*", metavar="METHOD", help="methods to measure anew; without names, all chosen"
    )
    parser.add_argument("--sizes", nargs="+", default=[], metavar="SIZE", help="budgets, such as 1.5MB")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (default: results/leaderboard)")
    return parser.parse_args(arguments)


def run(arguments: list[str] | None = None) -> None:
    options, methods = parse(arguments), all_methods()
    for given, known in ((options.tables, PLACES), ([*(options.only or ()), *(options.again or ())], methods)):
        for name in given:
            if name not in known:
                raise UserError(f"There is no {name!r} here{did_you_mean(name, sorted(known))}")
    chosen = {name: methods[name] for name in options.only or methods}
    again = () if options.again is None else options.again or [*chosen]
    sizes = [Budget.of(size).bytes for size in options.sizes]
    for name in options.tables or PLACES:
        place = PLACES[name]
        paths = place.paths(options.inputs)
        lacking = [f"{one} ({how})" for path, (one, how) in zip(paths, place.needs.items(), strict=True) if not path]
        if lacking:
            print(f"{name} is not measured: {options.inputs} lacks {' and '.join(lacking)}.", flush=True)
            continue
        print(f"{name}:", flush=True)
        measure(place.open(*paths), chosen, options.out / name, sizes, again, lambda line: print(line, flush=True))


def main() -> None:
    try:
        run()
    except (UserError, MachineError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
