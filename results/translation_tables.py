"""The tables of translators, with what they write, and the parts of hand-written pages that speak of them."""

from __future__ import annotations

import json
from pathlib import Path

from curves import draw_curves
from marked import write_between_marks
from old_names import read_run
from recipe_tables import HEADER, origins, row
from speed import training_speed

HERE = Path(__file__).parent


def translation_section(folder: Path) -> str:
    results = [read_run(path) for path in sorted(folder.glob("*.json"))]
    results.sort(key=lambda result: -result["test_bleu"])
    others = sorted({name for result in results for name in result.get("also", {})})
    elsewhere = [f"{name}, {score}" for name in others for score in ("BLEU", "chrF")]
    header = (*HEADER[:-2], "tokens/s", "BLEU", "chrF", *elsewhere, "sentences/s")
    lines = [f"## {folder.name}", "", "| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for result in results:
        scores = [f"{result[key]:.2f}" for key in ("test_bleu", "test_chrf")]
        for name in others:
            found = result.get("also", {}).get(name)
            scores += ["not run"] * 2 if found is None else [f"{found[key]:.2f}" for key in ("bleu", "chrf")]
        speeds = f"{training_speed(result):,.0f}", f"{result['decoded_sentences_per_second']:.1f}"
        cells = [*row(result, f"`{result['recipe']}`")[:-2], speeds[0], *scores, speeds[1]]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *origins(results)]
    lines += [
        "",
        '"tokens/s" is the speed of training, the median over the intervals between log lines. "sentences/s" is the '
        "speed of the beam search on the test set, without cached vectors.",
    ]
    picture = draw_curves(folder.name, {result["recipe"]: result for result in results})
    lines += ["", f"![Validation perplexity]({picture})"]
    best = results[0]
    lines += ["", f"### Ten test sentences, translated by `{best['recipe']}`", "", *translation_table(best)]
    return "\n".join(lines)


def translation_table(result: dict) -> list[str]:
    rows = [f"| {t['source']} | {t['translation']} | {t['reference']} |" for t in result["translations"]]
    return ["| source | translation | reference |", "|---|---|---|", *rows]


def write_translation_page(folder: Path) -> None:
    """The part of docs/translation.md that compares a translator with and without DeFINE."""
    names = ("transformer", "transformer-define")
    results = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    steps = {result["steps"] for result in results}
    assert len(steps) == 1, "The two models were trained for different numbers of steps."
    minutes = " and ".join(f"{result['seconds'] / 60:.1f}" for result in results)
    lines = [
        f"Each model trained for {steps.pop():,} steps ({results[0]['tokens'] / 1e6:.0f} M target tokens) on one "
        f"{results[0]['hardware']['gpu']}, in {minutes} minutes. No checkpoints were averaged.",
        "",
        "| recipe | parameters | Europarl, BLEU | chrF | newstest2014, BLEU | chrF |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        news = result["also"]["newstest2014"]
        scores = (result["test_bleu"], result["test_chrf"], news["bleu"], news["chrf"])
        cells = [f"`{result['recipe']}`", f"{result['parameters']['total'] / 1e6:.1f} M", *(f"{s:.2f}" for s in scores)]
        lines.append("| " + " | ".join(cells) + " |")
    write_between_marks(HERE.parent / "docs" / "translation.md", "europarl", "\n".join(lines))
