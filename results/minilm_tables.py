"""Writes results/minilm/README.md from the JSON files beside it, which results/minilm_front.py wrote."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "minilm"
HEADER = ("table", "bytes on disk", "M numbers", "cosine", "rank correlation", "table error", "seconds")

INTRODUCTION = """# Replacing MiniLM's token table

Written by `python results/minilm_tables.py` from the JSON files in this folder; nothing here is typed.
"cosine" is the mean between the sentence vectors of the original model and of the one with the replaced table, "rank
correlation" is Spearman's between all pairwise similarities of the two; both on sentences that nothing was fitted to or
chosen by. "table error" is the share of the table's frequency-weighted variance that is lost. A + marks the front on
the sentences that chose; seconds are for making the table.
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
        f"{text['distilled_on']:,} distilled; {result['seconds']:.0f} s in all on {hardware} "
        f"({result['hardware']['cpu_threads']} threads), torch {result['versions']['torch']}, commit "
        f"{(result['commit'] or 'unknown')[:12]}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    paths = sorted(FOLDER.glob("*.json"), key=lambda path: -json.loads(path.read_text())["budget_bytes"])
    (FOLDER / "README.md").write_text("\n".join([INTRODUCTION, *(section(path) for path in paths)]))


if __name__ == "__main__":
    main()
