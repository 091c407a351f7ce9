"""What a run writes is JSON for every tool, and damaged files are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from torchdefine.errors import UserError
from torchdefine.files import write_sealed
from torchdefine.run import RunFolder

DATA = {"vocabulary_sha256": "v", "splits": {}}
RESULT = {"recipe": "r", "settings": {}, "parameters": {}, "data": DATA, "steps": 1, "tokens": 1, "seconds": 1.0}


def strict_json(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_perplexity_that_is_not_finite_is_null_in_the_files(tmp_path: Path, value: float) -> None:
    folder = RunFolder(tmp_path)
    folder.log("valid", {"step": 1, "loss": 800.0, "perplexity": value})
    folder.log("valid", {"step": 2, "loss": 1.0, "perplexity": math.e})
    curve = [{"step": 1, "loss": 800.0, "perplexity": value}]
    evaluation = {"test": {"perplexity": value, "bits_per_byte": None}}
    folder.write_result({**RESULT, "test_perplexity": value, "evaluation": evaluation, "curve": curve})

    assert strict_json(folder.journal.read_text().splitlines()[0])["perplexity"] is None
    assert strict_json(folder.result.read_text())["evaluation"]["test"]["perplexity"] is None
    assert [record["perplexity"] for record in folder.records()] == [math.inf, math.e]
    result = folder.read_result()
    assert result["test_perplexity"] == result["curve"][0]["perplexity"] == math.inf
    assert result["evaluation"]["test"] == {"perplexity": math.inf, "bits_per_byte": None}

    folder.forget_after(1)
    strict_json(folder.journal.read_text())
    assert folder.records() == [{"kind": "valid", "step": 1, "loss": 800.0, "perplexity": math.inf}]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format_version": 2}, "has format version 2; this torchdefine reads 1"),
        ({}, "is damaged: it lacks evaluation"),
        ({"evaluation": {}, "data": {"vocabulary_sha256": "v"}}, r"is damaged: it lacks data\.splits"),
        ({"evaluation": {}, "data": None}, r"is damaged: it lacks data\.vocabulary_sha256, data\.splits"),
    ],
)
def test_results_of_newer_versions_and_damaged_ones_are_refused(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_result({**RESULT, "curve": [], **change})
    with pytest.raises(UserError, match=sentence):
        folder.read_result()


def counted(path: Path) -> RunFolder:
    """The folder of a run with three subwords."""
    folder = RunFolder(path)
    folder.fingerprints = {"vocabulary_sha256": "of three subwords", "vocabulary_size": 3}
    return folder


def test_token_counts_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = counted(tmp_path)
    assert folder.read_token_counts() is None
    folder.write_token_counts([7, 0, 2])
    assert folder.read_token_counts() == [7, 0, 2]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format_version": 2}, r"has format version 2; this torchdefine reads 1\.$"),
        ({"vocabulary_sha256": "another"}, "does not belong to this run's vocabulary, or is damaged: restore it, or"),
        ({"counts": [7, 0]}, "is damaged: restore it, or train again"),
        ({"counts": [7, None, 2]}, "is damaged: restore it, or train again"),
    ],
)
def test_token_counts_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    folder = counted(tmp_path)
    folder.write_token_counts([7, 0, 2])
    own = json.loads(folder.token_counts.read_text())
    folder.token_counts.write_text(json.dumps(own | change))
    with pytest.raises(UserError, match=r"was changed after it was written|has format version 2"):
        folder.read_token_counts()
    write_sealed(folder.token_counts, own | change)
    with pytest.raises(UserError, match=sentence):
        folder.read_token_counts()
