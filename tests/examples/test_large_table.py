"""The script for large tables on two gloo processes: its checkpoints fit one process, which goes on the same."""

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SCRIPT = Path(__file__).parents[2] / "examples" / "large_table.py"
TORCHRUN = ("torch.distributed.run", "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


def arguments(out: Path, steps: int = 10) -> list[str]:
    sizes = ("--rows", "2001", "--batch", "256", "--steps", str(steps), "--save-every", "5")
    return [*sizes, "--device", "cpu", "--out", str(out)]


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", printed)}


def as_one_of(processes: int, rank: int = 0) -> dict[str, str]:
    """What torchrun tells a process, with a port that is free."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    return {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def process(told: dict[str, str], given: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *given], env={**os.environ, "OMP_NUM_THREADS": "1", **told}, stdout=-1, text=True
    )


def same_weights(one: Path, other: Path, step: int) -> None:
    for out in (one, other):
        dcp_to_torch_save(out / str(step), out / "whole")
    first, second = (torch.load(out / "whole")["model"] for out in (one, other))
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-6, atol=1e-6, msg=name)


def test_one_process_goes_on_from_the_checkpoint_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def here(told: dict[str, str], out: Path) -> dict[int, float]:
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        runpy.run_path(str(SCRIPT))["main"](arguments(out))
        return losses(capsys.readouterr().out)

    told = as_one_of(2)
    with process({**told, "RANK": "1"}, arguments(tmp_path / "two")) as second:
        expected = here(told, tmp_path / "two")
    assert second.returncode == 0
    assert len(expected) == 10
    assert expected[10] < expected[1]
    shutil.copytree(tmp_path / "two" / "5", tmp_path / "one" / "5")
    found = here(as_one_of(1), tmp_path / "one")
    assert found == pytest.approx({step: expected[step] for step in range(6, 11)}, rel=1e-6)
    same_weights(tmp_path / "one", tmp_path / "two", 10)


@pytest.mark.slow
def test_two_killed_processes_go_on(tmp_path: Path) -> None:
    steps = 200

    def by_torchrun(out: Path) -> dict[int, float]:
        command: list[Any] = [sys.executable, "-m", *TORCHRUN, "--nproc-per-node", "2", SCRIPT, *arguments(out, steps)]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return losses(done.stdout)

    told, given = as_one_of(2), arguments(tmp_path / "cut", steps)
    both = [process({**told, "RANK": str(rank)}, given) for rank in (0, 1)]
    while not (tmp_path / "cut" / "5" / ".metadata").exists() and both[0].poll() is None:
        time.sleep(0.01)
    for one in both:
        one.kill()
        one.communicate()
    expected, found = by_torchrun(tmp_path / "whole"), by_torchrun(tmp_path / "cut")
    assert len(expected) == steps
    assert 0 < len(found) < steps
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-6)
    same_weights(tmp_path / "whole", tmp_path / "cut", steps)
