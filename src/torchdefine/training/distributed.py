"""The processes that train: one, or several: `torchrun --nproc-per-node 2 -m torchdefine train …` is all it takes."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchdefine.errors import UserError

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's constants
LARGEST_KEPT = (256 << 20, 32 << 20)  # older versions of glibc allow no more than the second


@dataclass(frozen=True)
class Processes:
    """This process among all those that train together."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, wish: str | None) -> torch.device:
        """This process's device: the requested one, or a GPU if there is one."""
        if wish not in (None, "cpu", "cuda"):
            raise UserError(f"The device {wish!r} is unknown: use cpu or cuda.")
        if wish == "cuda" and not torch.cuda.is_available():
            raise UserError("The device is cuda, but torch finds no GPU here: use cpu (--device cpu).")
        if wish != "cpu" and torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    def wrap(self, module: nn.Module) -> nn.Module:
        """Average gradients over the processes whenever ``module`` runs backward."""
        return module if self.count == 1 else DistributedDataParallel(module)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """One tensor of the same shape from every process."""
        if self.count == 1:
            return [tensor]
        everyones = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(everyones, tensor.contiguous())
        return everyones

    def facts_of_all(self, fact: Any) -> list[Any]:
        """A plain value from every process."""
        if self.count == 1:
            return [fact]
        text = json.dumps(fact).encode()
        sizes = self.gather(torch.tensor([len(text)], device=self.own_device))
        padded = text.ljust(int(max(sizes)))
        everyones = self.gather(torch.tensor(list(padded), dtype=torch.uint8, device=self.own_device))
        return [json.loads(bytes(one.tolist())) for one in everyones]

    @property
    def own_device(self) -> torch.device:
        """Where what is sent to other processes must be."""
        return torch.device("cuda", self.local_rank) if dist.get_backend() == "nccl" else torch.device("cpu")

    def mean(self, value: Tensor) -> Tensor:
        return torch.stack(self.gather(value)).mean(0)

    def any(self, flag: bool, device: torch.device) -> bool:
        return bool(self.mean(torch.tensor([float(flag)], device=device)) > 0)

    def of_first(self, value: float, device: torch.device) -> float:
        """The first process's number, for decisions that all must make alike: others may differ in the last bit."""
        return float(self.gather(torch.tensor([value], dtype=torch.float64, device=device))[0])

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined_processes(device: str | None = None) -> Iterator[Processes]:
    """Join the processes that torchrun started, if it did, to train on ``device``; leave them at the end.

    Numbers below 1e-38 count as zero from then on: on a CPU, probabilities that small made trained models six times
    slower. Threads inherit this when they start, so it comes before any work.
    """
    torch.set_flush_denormal(True)
    keep_freed_memory()
    started_by_torchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()
    count = int(os.environ["WORLD_SIZE"]) if started_by_torchrun else 1
    if count == 1:
        yield Processes()
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Processes(dist.get_rank(), count, local_rank)
    finally:
        dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Let the C library keep memory that a step frees for the next one, up to half a gigabyte.

    By default it returns large pieces to the system, which fills new ones with zeros, page by page. This takes a good
    part of a small model's step on a CPU. Where the library is not glibc, nothing changes.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    if any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_KEPT):
        mallopt(TRIM_THRESHOLD, 512 << 20)
