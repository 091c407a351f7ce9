from pathlib import Path

import pytest
import torch
from torch import nn

from torchdefine.errors import UserError
from torchdefine.run import RunFolder
from torchdefine.run.checkpoint_file import read_checkpoint
from torchdefine.run.run import average_checkpoints, mean_weights
from torchdefine.training.checkpoint import Checkpoint, Position, weights_of


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.fingerprints = {"vocabulary_sha256": "a", "vocabulary_size": 3}
    return folder


def test_the_latest_are_kept_and_averaged(folder: RunFolder) -> None:
    model = nn.Linear(3, 2)
    seen = {}
    for step in (5, 10, 95, 100):
        if len(seen) < 2:
            with pytest.raises(UserError, match=f"has kept {len(seen)} checkpoints, but an average needs two"):
                average_checkpoints(folder)
        nn.init.normal_(model.weight)
        folder.keep(weights_of(model, Position()), step, count=3)
        seen[step] = model.weight.detach().clone()
    assert [step for step, _ in folder.kept()] == [10, 95, 100]  # by number, not by name
    assert average_checkpoints(folder) == [10, 95, 100]
    average = read_checkpoint(folder.average, only="model")
    torch.testing.assert_close(average.tensors["model.weight"], (seen[10] + seen[95] + seen[100]) / 3)
    assert average.facts["averaged_steps"] == [10, 95, 100]
    assert average_checkpoints(folder, last=2) == [95, 100]
    for last in (1, 4):
        with pytest.raises(UserError, match="average 2 to 3 of them"):
            average_checkpoints(folder, last)


def test_checkpoints_of_another_vocabulary_are_refused(folder: RunFolder) -> None:
    for step in (1, 2):
        folder.keep(weights_of(nn.Linear(3, 2), Position()), step, count=3)
    folder.fingerprints = {"vocabulary_sha256": "b", "vocabulary_size": 4}
    with pytest.raises(UserError, match="another vocabulary"):
        average_checkpoints(folder)
    assert not folder.average.exists()


def test_ranks_are_taken_over_and_other_models_refused() -> None:
    one = Checkpoint({"w": torch.tensor([1.0, 3.0]), "ranks": torch.tensor([4, 2])}, {})
    other = Checkpoint({"w": torch.tensor([2.0, 5.0]), "ranks": torch.tensor([4, 2])}, {})
    mean = mean_weights([one, other])
    assert mean["w"].tolist() == [1.5, 4.0]
    assert mean["ranks"].tolist() == [4, 2]
    with pytest.raises(UserError, match="different models"):
        mean_weights([one, Checkpoint({"w": torch.ones(2)}, {})])


def test_whole_numbers_that_differ_have_no_average() -> None:
    one, other = (Checkpoint({"ranks": torch.tensor(ranks)}, {}) for ranks in ([0, 1, 2], [2, 1, 0]))
    assert torch.equal(mean_weights([one, one])["ranks"], torch.tensor([0, 1, 2]))
    with pytest.raises(UserError, match="differ in ranks"):
        mean_weights([one, other])
