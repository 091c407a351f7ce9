"""Writes the pages of results/ and the measured parts of docs/ from the JSON of the runs: `make results`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from claims import write_evidence_pages
from compared import compared_section
from demo_table import write_demo_page
from equalised_tables import equalised_section
from front_lines import write_front_lines
from long_tables import long_section
from look_up_tables import look_up_section
from map_tables import correlation_section
from marked import in_one_word
from paper_page import write_paper_pages
from recipe_tables import recipe_section
from scale_tables import demo_section, scales_section
from stage_tables import COMPARISONS, SEARCHES, stages_page
from token_function_tables import write_token_functions_page
from translation_tables import translation_section, write_translation_page

HERE = Path(__file__).parent
INTRODUCTION = """# Measured results

`make results` writes these pages from the JSON files in this folder; no number is typed by hand. The file of a recipe
is the `result.json` of one run: recipe, overrides, seed, commit, hardware, versions, hashes of the text, and the
curve. Recipes that are not listed have no result here.

| page | what it shows |
|---|---|
| [Trained models](models.md) | AWD-LSTM, Transformer-XL, translators and masked models |
| [Small runs](small.md) | models that train in minutes on a CPU |
| [Stages](stages.md), [rates and settings](stages-rates.md) | LSTM runs behind [the evidence](../docs/evidence.md) |
| [Scale and weight scaling](scales.md) | both settings in small models |
| [Other methods and packed tables](tables.md) | what the paper compares with; cached and packed vectors |
| [Correlation maps](maps.md) | the numbers behind [the maps](../docs/maps.md) |
| [Leaderboard](leaderboard/README.md) | table methods at equal bytes, on a sentence encoder and other tables |
| [Benchmarks](benchmarks/README.md) | speed and memory |
"""
COLUMNS = """\
Each section has the name of its folder. "unit", "context", "tables" and "total" are millions of parameters. "valid"
and "test" are perplexities. "unigram" is the test perplexity of a model that only counts words. "published test" is
the paper's number for the recipe, after full training on the paper's text.
"""
MODELS = ("europarl", "masked", "ptb", "tatoeba", "txl", "wikitext2")
SMALL = ("adaptive-input", "delight-parts", "demo", "recurrent", "txl-memory", "txl-small")


def main() -> None:
    stages = HERE / "wiki78m"
    write_page("README", [INTRODUCTION, long_section(HERE / "long")])
    write_page("models", ["# Trained models\n", COLUMNS, *map(section, MODELS)])
    write_page("small", ["# Small runs\n", COLUMNS, *map(section, SMALL)])
    write_page(
        "maps", ["# Correlation maps in numbers\n", COLUMNS, section("maps"), correlation_section(HERE / "maps")]
    )
    write_page("stages", [stages_page("LSTM runs in stages", stages, COMPARISONS)])
    write_page("stages-rates", [stages_page("LSTM runs: rates and settings", stages, SEARCHES)])
    write_page("scales", scales_page())
    write_page("tables", tables_page())
    write_translation_page(HERE / "europarl")
    write_evidence_pages(stages)
    write_demo_page(HERE / "demo.json")
    write_front_lines(HERE)
    write_token_functions_page(HERE / "token-functions")
    write_paper_pages()


def write_page(name: str, parts: Iterable[str]) -> None:
    (HERE / f"{name}.md").write_text(in_one_word("\n".join(parts)).rstrip("\n") + "\n")


def scales_page() -> list[str]:
    parts = (
        equalised_section(HERE / "equalised"),
        scales_section(HERE / "scales"),
        demo_section(HERE / "demo-scales"),
    )
    return ["# Scale and weight scaling in numbers\n", *parts]


def tables_page() -> list[str]:
    return [
        "# Other methods and packed tables\n",
        look_up_section(HERE / "inference"),
        compared_section(HERE / "compared"),
    ]


def section(name: str) -> str:
    """What the runs of a folder's files have to show."""
    folder = HERE / name
    first = json.loads(min(folder.glob("*.json")).read_text())
    return (translation_section(folder) if "test_bleu" in first else recipe_section(folder)) + "\n"


if __name__ == "__main__":
    main()
