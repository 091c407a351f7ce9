"""The card of a model with a smaller table: sizes, tokens, measures; as ONNX, how it is run too."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchdefine.adapt.measures import Measure, explained
from torchdefine.adapt.model_folder import CARD_FILE, FORMER_CARD_FILE, REPORT_FILE
from torchdefine.files import read_json, read_text, write_text
from torchdefine.plain import escaped
from torchdefine.tables.budget import readable_bytes

_RUN = """```python
import numpy
import onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
session = onnxruntime.InferenceSession("{file}")
tokens = tokenizer.encode("A sentence of yours.")
named = {{"input_ids": tokens.ids, "attention_mask": tokens.attention_mask, "token_type_ids": tokens.type_ids}}
given = {{port.name: numpy.array([named[port.name]], dtype=numpy.int64) for port in session.get_inputs()}}
(found,) = session.run(None, given)
print(found.shape)
```"""


def adapted_card(folder: Path, architecture: str, program: Mapping[str, Any]) -> str:
    """The text of ``README.md`` for a folder with an ONNX program."""
    takes = ", ".join(f"`{name}`" for name in program["inputs"])
    size, by = readable_bytes(program["bytes"]), ", ".join(program["operators"]) or "plain operators"
    sections = [
        "---\nlibrary_name: onnxruntime\n---",
        f"# {architecture} with a compact token table, as ONNX",
        f"`{program['file']}` ({size}) takes {takes}: integers of the shape (texts, tokens). It gives "
        f"`{program['output']}`, of the shape (texts, tokens, …). Its table is unpacked by {by}.",
        "torchdefine compared the outputs of onnxruntime with those of the model. The largest difference is "
        f"{program['largest_difference']:.1e}, relative for numbers above 1.",
        *measured(folder, "onnx"),
        "## Run it",
        _RUN.format(file=program["file"]),
        "transformers.js and Optimum find the program in this folder.",
    ]
    return "\n\n".join(sections) + "\n"


def add_measures(folder: Path) -> None:
    """Add what was made smaller to the card that ``save_pretrained`` left in a folder."""
    card = folder / CARD_FILE
    sections = measured(folder)
    if read_json(folder / REPORT_FILE)["rest"] == "int8":
        sections.append("The linear layers have 8 bits for each weight. To load them, `pip install torchao`.")
    if (folder / FORMER_CARD_FILE).exists():
        sections.append(f"`{FORMER_CARD_FILE}` is the card of the old model.")
    write_text(card, "\n\n".join([read_text(card).rstrip(), *sections]) + "\n")


def measured(folder: Path, format: str | None = None) -> list[str]:
    """What ``adapt`` made smaller, by which commands, and what it cost; nothing if it left no report."""
    if not (folder / REPORT_FILE).is_file():
        return []
    report = read_json(folder / REPORT_FILE)
    kept, held = report["vocabulary"], dict(report["held_out"])
    sentences = held.pop("sentences")
    rows = ["| table | method | bytes | bytes unpacked |", "|---|---|---|---|"]
    for table, fitted in zip(report["tables"], report["fits"].values(), strict=True):
        names = escaped(", ".join(table["names"]))
        rows.append(f"| {names} | {fitted['chosen']} | {table['bytes_after']:,} | {table['bytes_before']:,} |")
    budget = sum(fitted["budget_bytes"] for fitted in report["fits"].values())
    vocabulary = shlex.quote(kept["choice"])
    exported = f", then `torchdefine export FOLDER --format {format}`" if format else ""
    return [
        "## What was made smaller",
        "\n".join(rows),
        f"Tokens kept: {kept['tokens'][1]:,} of {kept['tokens'][0]:,}. Tokenizer files: {kept['tokenizer_bytes'][1]:,} "
        f"of {kept['tokenizer_bytes'][0]:,} bytes.",
        f"Compared with the old model on {sentences:,} held-out sentences, with 95 % intervals:",
        "\n".join(f"- {escaped(line)}" for line in explained({name: Measure(**one) for name, one in held.items()})),
        f"Made by torchdefine {report['versions']['torchdefine']}: `torchdefine adapt MODEL_DIR --text TEXT "
        f"--out FOLDER --budget {budget}B --vocabulary {vocabulary}`{exported}.",
    ]
