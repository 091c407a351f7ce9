"""Tensor parallelism, and FSDP2 with the table in a unit of its own, by two processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.behaviour.models import CASES
from tests.behaviour.run import KINDS

LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The replacement of")  # the tables are tiny
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("llama-tied", how) for how in ("tp", "root", "unit", "pair")),
        *(("llama-untied", how) for how in ("tp", "unit")),
        *((name, "unit") for name in ("gpt2", "t5")),
        ("qwen3", "tp"),
    ],
)
def test_split_between_two_processes(name: str, how: str, kind: str, tmp_path: Path) -> None:
    case = CASES[name]
    KINDS[kind](case.make()).save_pretrained(tmp_path)
    script = [str(Path(__file__).with_name("two_processes.py")), how, case.auto, str(tmp_path)]
    command = [sys.executable, *LAUNCH, "--rdzv-endpoint", "localhost:0", *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("alike") == 2
