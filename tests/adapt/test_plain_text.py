import lzma
from pathlib import Path

import pytest
import torch

from torchdefine.adapt.plain_text import sentence_parts, token_counts
from torchdefine.errors import UserError


def test_parts_have_no_sentence_in_common(tmp_path: Path) -> None:
    path = tmp_path / "text.txt.xz"
    lines = [f"sentence number {n} of many" for n in range(600)]
    with lzma.open(path, "wt") as file:
        file.write(
            ". ".join(lines) + ".\n" + "\n".join([*(f"{line}." for line in lines), "", "too short", " = Heading = "])
        )
    parts = sentence_parts(path, choosing=50, held_out=100)
    assert (len(parts.choosing), len(parts.held_out), len(parts.fitting)) == (50, 100, 450)
    assert {*parts.fitting, *parts.choosing, *parts.held_out} == {f"{line}." for line in lines}
    assert sentence_parts(path, choosing=50, held_out=100) == parts
    assert len(sentence_parts(path, limit=90).held_out) == 30


def test_short_and_missing_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("one line of text\n")
    with pytest.raises(UserError, match="has 1 different sentences"):
        sentence_parts(path)
    with pytest.raises(UserError, match="There is no text file"):
        sentence_parts(tmp_path / "missing.txt")


def test_tokens_are_counted() -> None:
    def tokenizer(sentences: list[str], truncation: bool, verbose: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word) for word in sentence.split()] for sentence in sentences]}

    counts = token_counts(tokenizer, ["1 2 2", "4 1"] * 700, 6)
    assert torch.equal(counts, torch.tensor([0, 1400, 1400, 0, 700, 0]))
