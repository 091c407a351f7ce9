"""Online compression: a run that starts from the best low rank of another run's table."""

from pathlib import Path

import pytest
import torch

from torchdefine import train
from torchdefine.errors import UserError

PARTS = {"unit": {"kind": "none"}, "output": {"kind": "full", "tied": "finished"}}
CONTEXT = {"layers": 1, "output_dim": 16}


def test_it_starts_from_the_best_low_rank_and_learns_on(recipe_file: Path, tmp_path: Path) -> None:
    common = {"context": CONTEXT, **PARTS}
    wide = train(
        recipe_file, out=tmp_path / "wide", embedding={"kind": "standard", "map_dim": 16, "scale": 2.0}, **common
    )
    narrow = {"kind": "projective", "map_dim": 5, "output_dim": 16, "scale": 0.5}
    start = {"start_from": str(tmp_path / "wide")}
    still = train(
        recipe_file, out=tmp_path / "still", embedding=narrow, train={**start, "steps": 1}, optim={"lr": 1e-9}, **common
    )
    table = wide.embedding.table().double()
    u, s, v = torch.linalg.svd(table, full_matrices=False)
    best = (u[:, :5] * s[:5]) @ v[:5]
    torch.testing.assert_close(still.embedding.table().double(), best, rtol=1e-3, atol=1e-4)
    learned = train(
        recipe_file,
        out=tmp_path / "learned",
        embedding=narrow,
        train={**start, "steps": 40},
        schedule={"kind": "cyclic", "cycles": 2},
        **common,
    )
    assert learned.result["test_perplexity"] < still.result["test_perplexity"]


def test_another_width_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    common = {"context": CONTEXT, **PARTS}
    few = {"steps": 1}
    train(recipe_file, out=tmp_path / "wide", embedding={"kind": "standard", "map_dim": 16}, train=few, **common)
    other = {"kind": "projective", "map_dim": 5, "output_dim": 24}
    start = {**few, "start_from": str(tmp_path / "wide")}
    with pytest.raises(UserError, match="whose weights do not fit"):
        train(recipe_file, out=tmp_path / "other", embedding=other, train=start, **common)
