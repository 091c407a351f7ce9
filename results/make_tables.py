"""Writes results/README.md and the measured parts of docs/ from the JSON of the runs: `make results`."""

from __future__ import annotations

import json
from pathlib import Path

from claims import write_evidence_page
from compared import compared_section
from demo_table import write_demo_page
from equalised_tables import equalised_section
from front_lines import write_front_lines
from long_tables import long_section
from look_up_tables import look_up_section
from map_tables import correlation_section
from marked import in_one_word
from paper_page import write_paper_page
from recipe_tables import recipe_section
from scale_tables import demo_section, scales_section
from stage_tables import all_stages
from token_function_tables import write_token_functions_page
from translation_tables import translation_section, write_translation_page

HERE = Path(__file__).parent
INTRODUCTION = """# Measured results

`make results` writes this page from the JSON files in this folder; no number is typed by hand. The file of a recipe is
the `result.json` of one run: recipe, overrides, seed, commit, hardware, versions, hashes of the text, and the curve.
`results/inference_table.py` wrote the files in `inference/`.

"unit", "context", "tables" and "total" are millions of parameters. "valid" and "test" are perplexities. "unigram" is
the test perplexity of a model that only counts words. "published test" is the paper's number for the recipe, after
full training on the paper's text. Recipes that are not listed have no result here.

[leaderboard/](leaderboard/README.md) shows table methods at equal bytes, on a sentence encoder and other tables.
[benchmarks/](benchmarks/README.md) shows speed and memory.
"""


def main() -> None:
    others = (
        "benchmarks",
        "inference",
        "wiki78m",
        "equalised",
        "scales",
        "demo-scales",
        "click-model",
        "drill",
        "shrink",
        "compared",
    )
    folders = sorted(p for p in HERE.iterdir() if p.is_dir() and p.name not in others and any(p.glob("*.json")))
    stages = HERE / "wiki78m"
    page = "\n".join(
        [
            INTRODUCTION,
            *(section(folder) + "\n" + correlation_section(folder) for folder in folders),
            all_stages(stages),
            long_section(HERE / "long"),
            equalised_section(HERE / "equalised"),
            scales_section(HERE / "scales"),
            demo_section(HERE / "demo-scales"),
            look_up_section(HERE / "inference"),
            compared_section(HERE / "compared"),
            "",
        ]
    )
    (HERE / "README.md").write_text(in_one_word(page))
    write_translation_page(HERE / "europarl")
    write_evidence_page(stages)
    write_demo_page(HERE / "demo.json")
    write_front_lines(HERE)
    write_token_functions_page(HERE / "token-functions")
    write_paper_page()


def section(folder: Path) -> str:
    """What the runs of a folder's files have to show."""
    first = json.loads(min(folder.glob("*.json")).read_text())
    return translation_section(folder) if "test_bleu" in first else recipe_section(folder)


if __name__ == "__main__":
    main()
