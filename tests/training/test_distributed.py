"""Two gloo processes against one process with the doubled batch."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torchdefine import train
from torchdefine.cli import command_line
from torchdefine.data import encode_corpus
from torchdefine.errors import MachineError, UserError
from torchdefine.recipe import load_recipe
from torchdefine.run import RunFolder
from torchdefine.run.checkpoint_file import read_checkpoint, write_checkpoint
from torchdefine.task import find_task
from torchdefine.training.distributed import Processes, joined_processes

STILL = [
    *("--unit.dropout", "0", "--embedding.row_dropout", "0"),
    *("--context.input_dropout", "0", "--context.hidden_dropout", "0", "--loss.output_dropout", "0"),
    *("--train.steps", "50", "--train.log_every", "1", "--train.batch_size", "8", "--train.checkpoint_every", "10"),
]


def command(processes: int, recipe: Path, out: Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "torchdefine"]
    if processes > 1:
        run = [
            "torch.distributed.run",
            "--nproc-per-node",
            str(processes),
            "--master-port",
            "0",
            "--rdzv-backend",
            "c10d",
        ]
        start = [sys.executable, "-m", *run, "--rdzv-endpoint", "localhost:0", "-m", "torchdefine"]
    return [*start, "train", str(recipe), "--out", str(out), "--device", "cpu", *STILL, *more]


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(out).records("train")]


def run(arguments: list[str]) -> None:
    done = subprocess.run(
        arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def alone(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    run(command(1, recipe_file, out))
    return out


def test_two_processes_refuse_a_command_with_one_voice(recipe_file: Path, tmp_path: Path) -> None:
    (taken := tmp_path / "taken").mkdir()
    (taken / "letter.txt").write_text("somebody's")
    refused = {
        "The setting --optim.lrr is unknown": command(2, recipe_file, tmp_path / "new", "--optim.lrr", "3"),
        f"{taken} holds letter.txt already, but no run": command(2, recipe_file, taken),
        "There is neither a folder nor a corpus called nowhere": command(
            2, recipe_file, tmp_path / "new", "--data", "nowhere"
        ),
    }
    for sentence, arguments in refused.items():
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1, done.stderr[-2000:]
        said = [line for line in done.stderr.splitlines() if line.startswith("torchdefine: ")]
        assert len(said) == 1, done.stderr[-2000:]
        assert said[0].startswith(f"torchdefine: {sentence}")
        assert "torchdefine/run.py" not in done.stderr  # the one traceback is torchrun's


DISAGREEING = """
import os, sys
from pathlib import Path
from torchdefine import train, UserError
recipe, out, text, what = sys.argv[1:]
second = os.environ["RANK"] == "1"
train_settings = {"steps": 5, "batch_size": 8, "seed": 2 if second and what == "recipe" else 1}
data = text if second and what == "text" else None
try:
    train(recipe, out=out, data=data, device="cpu", train=train_settings)
except UserError as error:
    Path(f"{out}-{os.environ['RANK']}").write_text(str(error))
    sys.exit(0)  # or torchrun would end the other one first
"""


@pytest.mark.parametrize("what", ["recipe", "text"])
def test_processes_that_would_train_something_else_refuse(
    recipe_file: Path, corpus: Path, tmp_path: Path, what: str
) -> None:
    other = shutil.copytree(corpus, tmp_path / "other")
    (other / "valid.txt").write_text((corpus / "valid.txt").read_text() + "w1\n")
    (script := tmp_path / "both.py").write_text(DISAGREEING)
    arguments = command(2, recipe_file, tmp_path / "run")
    start = arguments[: arguments.index("localhost:0") + 1]
    run([*start, str(script), str(recipe_file), str(tmp_path / "run"), str(other), what])
    for rank in (0, 1):
        said = (tmp_path / f"run-{rank}").read_text()
        assert said.startswith(f"The processes do not agree on the {what}: give all of them the same")
    assert not (tmp_path / "run").exists()


def test_a_process_that_nobody_speaks_for_says_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    for rank, waits in (("0", 0), ("1", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            command_line.run_command(["trian"])
        assert len(waited) == waits
        assert capsys.readouterr().err == "torchdefine: The command 'trian' is unknown: did you mean 'train'?\n"


def test_two_processes_reproduce_one_with_the_doubled_batch(alone: Path, recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    run(command(2, recipe_file, out))
    one, two = losses(alone), losses(out)
    assert len(one) == len(two) == 50
    assert two == pytest.approx(one, rel=1e-5)
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (alone, out))
    assert second["processes"] == 2
    assert second["tokens"] == first["tokens"]
    assert second["test_perplexity"] == pytest.approx(first["test_perplexity"], rel=1e-4)


def judged_by_its_own_process(rank: int, port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    with joined_processes("cpu") as processes:
        Path(folder, str(rank)).write_text(str(processes.of_first(0.1 + rank, torch.device("cpu"))))


def test_all_processes_go_by_the_loss_of_the_first(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(judged_by_its_own_process, (port, str(tmp_path)), nprocs=2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0.1", "0.1"]


def test_the_streams_of_each_process_are_cut_into_equal_parts(recipe_file: Path, corpus: Path) -> None:
    recipe = load_recipe(recipe_file, {"train": {"accumulate": 4}})  # which its 4 streams allow, but not 2
    with pytest.raises(UserError, match="The 2 rows of a process cannot be split into 4 equal parts"):
        find_task("language").batches(recipe, encode_corpus(corpus), torch.device("cpu"), Processes(1, 2))


def test_a_run_goes_on_with_as_many_processes_as_before(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, out=tmp_path, train={"steps": 3})
    folder = RunFolder(tmp_path)
    folder.result.unlink()
    checkpoint = read_checkpoint(folder.last)
    write_checkpoint(folder.last, checkpoint.tensors, {**checkpoint.facts, "processes": 2})
    with pytest.raises(MachineError, match="by 2 processes, so resume it with as many, not with 1"):
        train(out=tmp_path, resume=True)


@pytest.mark.slow
def test_two_killed_processes_resume(recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    process = subprocess.Popen(
        command(2, recipe_file, out, "--train.steps", "600"), env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    while not RunFolder(out).last.exists() and process.poll() is None:
        time.sleep(0.01)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()  # the workers are in sessions of their own and would go on
    for worker in map(int, workers):
        os.kill(worker, signal.SIGKILL)
    process.wait()
    assert len(workers) == 2
    assert not (out / "result.json").exists()
    run(command(2, recipe_file, out, "--train.steps", "600", "--resume"))
    run(command(2, recipe_file, tmp_path / "whole", "--train.steps", "600"))
    assert losses(out) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_reproduce_one_with_everything_of_awd_lstm_but_dropout(recipe_file: Path, tmp_path: Path) -> None:
    awd = [
        *("--loss.activation_penalty", "2", "--loss.temporal_penalty", "1", "--train.random_length", "true"),
        *(
            "--averaging.kind",
            "always",
            "--optim.kind",
            "sgd",
            "--optim.lr",
            "2",
            "--optim.clip",
            "1",
            "--train.eval_every",
            "25",
        ),
    ]
    for processes in (1, 2):
        run(command(processes, recipe_file, tmp_path / str(processes), *awd))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    curves = [json.loads((tmp_path / str(n) / "result.json").read_text())["curve"] for n in (1, 2)]
    assert [p["loss"] for p in curves[1]] == pytest.approx([p["loss"] for p in curves[0]], rel=1e-5)


@pytest.mark.slow
def test_two_processes_train_with_recurrent_dropout(recipe_file: Path, tmp_path: Path) -> None:
    run(command(2, recipe_file, tmp_path / "run", "--context.recurrent_dropout", "0.3"))
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("wish", "backend", "taken"), [("cpu", "gloo", []), (None, "nccl", [1]), ("cuda", "nccl", [1])]
)
def test_processes_on_the_cpu_of_a_machine_with_gpus_speak_gloo(
    wish: str | None, backend: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL carries nothing that lies on a CPU."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    started, devices = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", started.append)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with joined_processes(wish) as processes:
        assert (processes.rank, processes.count) == (1, 2)
    assert (started, devices) == ([backend], taken)
