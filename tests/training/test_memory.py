import ctypes
import platform
import subprocess
import sys

import pytest

from torchdefine.training.distributed import keep_freed_memory

COUNT_FAULTS = """
import resource, sys, torch
from torchdefine.training.distributed import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    torch.ones(5 << 20), torch.ones(4 << 20), torch.ones(10 << 20)  # 20, 16 and 40 MiB
for _ in range(5):
    step()  # the heap grows to its size
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_a_step_finds_the_memory_of_the_one_before() -> None:
    faults = {}
    for how in ("given back", "kept"):
        done = subprocess.run([sys.executable, "-c", COUNT_FAULTS, how], capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    assert faults["given back"] > 2000  # else there is nothing to gain here, and the function can go
    assert faults["kept"] < faults["given back"] / 3


@pytest.mark.parametrize("reply", [OSError("no such library"), AttributeError("no such function")])
def test_without_glibc_nothing_happens(reply: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(name: str) -> None:
        asked.append(name)
        raise reply

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    keep_freed_memory()  # and no error
    assert asked == ["libc.so.6"]
