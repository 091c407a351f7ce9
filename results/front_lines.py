"""The evidence in five lines of the project's README: `make results`."""

from __future__ import annotations

from pathlib import Path

from claims import difference, largest_difference_of_seeds
from marked import write_between_marks
from old_names import read_run
from stage_tables import read_rows

HERE = Path(__file__).parent
LAST = (
    "- Every number comes from a JSON file that a run wrote: [results](results/README.md), [claim by "
    "claim](docs/evidence.md), [the paper row by row](docs/paper.md)."
)


def write_front_lines(folder: Path) -> None:
    """``folder`` has the results; the lines go between two marks of README.md."""
    write_between_marks(HERE.parent / "README.md", "evidence", "\n".join([*of_lstms(folder / "wiki78m"), LAST]))


def of_lstms(stages: Path) -> list[str]:
    chosen, clean = read_rows(stages / "decisive"), read_rows(stages / "ablation-clean")
    tokens = chosen["R3"][0]["tokens"] / 1e6
    scale = difference(chosen["R2 scaled"], chosen["R2"], "test_perplexity")
    unit = difference(chosen["R3"], chosen["R2 and an equalised projection"], "test_perplexity")
    apart = largest_difference_of_seeds({"decisive": chosen}) or 0.0
    skip = difference(clean["HGT"], clean["no mixer"], "test_perplexity")
    return [
        "- **Scale first.** With SGD and tied tables, the size of the token vectors matters most. At the same learning "
        f"rate, scaling them lowered test perplexity by {-scale:.0%}. Use `--embedding.scale unit-rms`.",
        f"- **DeFINE or one projection?** We trained LSTMs on {tokens:.0f} M tokens, both with weight scaling. The "
        f"test perplexity was {abs(unit):.1%} {'higher' if unit > 0 else 'lower'} with DeFINE than "
        "with one projection. Two seeds of one model differ "
        f"by up to {apart:.1%}.",
        f"- **Inside the unit**, the skip connection matters: without it, perplexity rose by {skip:.0%}. More depth "
        "did not help.",
        of_translation(stages.parent / "europarl"),
    ]


def of_translation(folder: Path) -> str:
    without, with_define = (read_run(folder / f"{name}.json") for name in ("transformer", "transformer-define"))
    lost = without["test_bleu"] - with_define["test_bleu"]
    saved = 1 - with_define["parameters"]["total"] / without["parameters"]["total"]
    return f"- **In translation**, DeFINE saved {saved:.0%} of the parameters and lost {lost:.1f} BLEU."
