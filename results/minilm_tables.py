"""Writes results/minilm/README.md and its pictures from the JSON files there, which results/minilm_front.py wrote."""

from __future__ import annotations

import json
from pathlib import Path

from marked import write_between_marks
from provenance import short_commit

from torchdefine.adapt.fitted import Measured, front_of, points_figure
from torchdefine.analysis.pictures import save_figure

FOLDER = Path(__file__).parent / "minilm"
HEADER = ("table", "bytes on disk", "M numbers", "cosine", "rank correlation", "table error", "seconds")

IN_SHORT = {
    "bits by importance: what `adapt` chose": "bits by importance",
    "low rank by frequency, 4 bits": "ranks by frequency",
    "a DeFINE unit, 4 bits": "DeFINE",
    "product quantisation": "product codes",
    "every number in 2 bits": "int2",
    "SVD, 4 bits": "SVD",
}
"""What the project's README says of a kind, and how the names of its candidates begin."""

INTRODUCTION = """# Replacing MiniLM's token table

`python results/minilm_tables.py` writes this page from the JSON files in this folder.
"cosine" is the mean cosine between the sentence vectors with the original and with the replaced table. "rank
correlation" is Spearman's, between all pairwise similarities of the two. Both use held-out sentences, which served
neither fitting nor choosing. "table error" is the fraction of the table's frequency-weighted variance that is lost.
A + marks the Pareto front on the sentences used for choosing. "seconds" is the time to make the table. The pictures
show the held-out numbers.

Limits: methods were tuned on about 600 sentences from similar sources; a few of them may be among the held-out ones.
DeFINE and the MLP were tuned more than the others. They have 2,000 steps, because 200 left them far from converged.
Their small tables have 4 bits; this was chosen after a table of 8 bits had been measured on these held-out sentences.
Only the chosen table was distilled. There is one seed. The budget covers the tensors; a file's header is extra.

![All sizes together](front.svg)
"""


def section(path: Path) -> str:
    result = json.loads(path.read_text())
    text, held_out = result["text"], result["chosen_held_out"]
    kind = "parameters in float32" if result["floats_only"] else "bytes"
    hardware = result["hardware"].get("gpu") or result["hardware"]["cpu"]
    lines = [
        f"## At most {result['budget_bytes'] / 4 if result['floats_only'] else result['budget_bytes']:,.0f} {kind}",
        "",
        f"{result['why']} On {text['measured_on']:,} other sentences: cosine {held_out['cosine']:.4f}, rank "
        f"correlation {held_out['spearman']:.4f}, {held_out['bytes_on_disk']:,} bytes on disk.",
        "",
        f"![The front]({path.stem}.svg)",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---" + "|---:" * (len(HEADER) - 1) + "|",
    ]
    for one in sorted(result["candidates"], key=lambda one: -one["cosine"]):
        cells = (
            f"{one['name']}{' +' if one['on_front'] else ''}",
            f"{one['bytes_on_disk']:,}",
            f"{one['values'] / 1e6:.2f}",
            f"{one['cosine']:.4f}",
            f"{one['spearman']:.4f}",
            f"{one['table_error']:.4f}",
            f"{one['seconds']:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"- {one['name']} was left out: {one['reason']}" for one in result["skipped"]]
    lines += [
        "",
        f"{result['model']}; text {text['name']}, {text['sentences']:,} sentences, {text['chosen_on']} of them chose, "
        f"{text['sensitivity_from']:,} gave the sensitivity ({result['sensitivity_seconds']:.0f} s), "
        f"{text['distilled_on']:,} distilled; units fitted for {result['units']['steps']:,} steps; "
        f"seed {result['seed']}; {result['seconds']:.0f} s in all on {hardware} "
        f"({result['hardware']['cpu_threads']} threads), torch {result['versions']['torch']}, commit "
        f"{short_commit(result['commit'])}.",
        "",
    ]
    return "\n".join(lines)


def measured(path: Path) -> list[Measured]:
    """The candidates of one file, by what they measured on the sentences that nothing was chosen by."""
    return [
        Measured(
            one.get("method") or one["family"],  # its name in older files
            one["name"],
            one["bytes_on_disk"],
            one["values"],
            one["cosine"],
            one["table_error"],
            one["seconds"],
        )
        for one in json.loads(path.read_text())["candidates"]
    ]


def front_table(paths: list[Path]) -> str:
    """For the project's README: what each kind of table keeps of the model, at equal bytes; the best of each kind."""
    results = [result for result in (json.loads(path.read_text()) for path in paths) if not result["floats_only"]]
    sizes = [f"{result['budget_bytes'] / 1e6:.1f} MB" for result in results]
    lines = ["| table | " + " | ".join(sizes) + " |", "|---" + "|---:" * len(sizes) + "|"]
    for label, beginning in IN_SHORT.items():
        found = [[c["cosine"] for c in r["candidates"] if c["name"].startswith(beginning)] for r in results]
        lines.append(f"| {label} | " + " | ".join(f"{max(ones):.4f}" if ones else "–" for ones in found) + " |")
    whole, text = results[0]["table"], results[0]["text"]
    said = (
        f"Half of the sentence encoder MiniLM is its token table: {whole['bytes'] / 1e6:.1f} MB. The numbers are mean "
        f"cosines between sentence vectors before and after, on {text['measured_on']:,} sentences that nothing was "
        "chosen by ([all candidates](results/minilm/README.md)):\n\n"
    )
    return said + "\n".join(lines)


def main() -> None:
    paths = sorted(FOLDER.glob("*.json"), key=lambda path: -json.loads(path.read_text())["budget_bytes"])
    (FOLDER / "README.md").write_text("\n".join([INTRODUCTION, *(section(path) for path in paths)]))
    write_between_marks(FOLDER.parent.parent / "README.md", "shrink", front_table(paths))
    pictures = {path.stem: measured(path) for path in paths}
    pictures["front"] = [one for points in pictures.values() for one in points]
    for name, points in pictures.items():
        save_figure(points_figure(points, front_of(points), "mean cosine"), FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
