"""The script behind the correlation maps: it compares a run with the model it began as."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from torchdefine import train

pytest.importorskip("PIL")
look_at_maps = import_module("look_at_maps")


def test_the_untrained_model_is_the_one_that_the_run_began_with(recipe_file: Path, tmp_path: Path) -> None:
    run = train(recipe_file, out=tmp_path / "run", train={"steps": 1, "eval_every": 1}, optim={"lr": 1e-9})
    began = look_at_maps.untrained(run).state_dict()
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(began[name], tensor, rtol=0, atol=1e-7)
