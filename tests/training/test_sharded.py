"""Two gloo processes with a sharded table, or with sparse gradients, against one process with both halves."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchdefine import AdaptiveMap, DeFINE, StandardMap
from torchdefine.output import FullSoftmax
from torchdefine.training import OPTIMIZERS
from torchdefine.training.optimizers import RestAndTables, RowwiseAdagrad

V, M = 41, 8  # the halves differ by a row
IDS = torch.randint(0, V, (5, 2, 6), generator=torch.Generator().manual_seed(1))  # (steps, processes, ids)


class Model(nn.Module):
    """Predicts each id from itself; its loss is a mean over ids."""

    def __init__(self, tied: bool = False, adaptive: bool = False, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        table: Any = StandardMap(V, M, sparse=sparse)
        if adaptive:
            table = AdaptiveMap(V, M, (9, 20), 2)
            table.sparse = sparse
        self.embedding = DeFINE.over(table, M, expand_dim=16)
        self.output = FullSoftmax(M, table) if tied else FullSoftmax(M, num_embeddings=V)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.output.loss(self.embedding(ids), ids)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def expected(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    for ids in IDS:
        optimizer.zero_grad()
        model(ids.flatten()).backward()
        optimizer.step()
    return model.state_dict()


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, foreach=False)


def rows_by_dtensor(rank: int) -> tuple[Model, dict[str, Tensor]]:
    """The plan of docs/large-tables.md: own ids, own vectors; the rest of the gradients is averaged by hand."""
    model, other = Model(), Model()
    mesh = init_device_mesh("cpu", (2,))
    plan = {"map.table": RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))}
    parallelize_module(model.embedding, mesh, plan)
    assert len(model.embedding.map.table.weight.to_local()) == (21, 20)[rank]
    optimizer = adagrad(model)
    for ids in IDS:
        optimizer.zero_grad()
        (model(ids[rank]) / 2).backward()
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
        optimizer.step()
    return model, expected(other, adagrad(other))


def by_fsdp(rank: int, tied: bool) -> tuple[Model, dict[str, Tensor]]:
    model, other = Model(tied), Model(tied)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.embedding.map, mesh=mesh, reshard_after_forward=not tied)
    fully_shard(model, mesh=mesh)
    optimizer = adagrad(model)
    for ids in IDS:
        optimizer.zero_grad()
        model(ids[rank]).backward()
        optimizer.step()
    return model, expected(other, adagrad(other))


def sparse_by_ddp(rank: int, adaptive: bool) -> tuple[Model, dict[str, Tensor]]:
    def optimizer_of(model: Model) -> torch.optim.Optimizer:
        config = OPTIMIZERS.read({"kind": "adam", "lr": 0.01, "sparse": "rowwise-adagrad"})
        parts = model.embedding.map.modules()
        tables = [part.weight for part in parts if isinstance(part, nn.Embedding)]
        return config.build_with_tables(model.parameters(), tables, torch.device("cpu"))

    model, other = Model(adaptive=adaptive, sparse=True), Model(adaptive=adaptive, sparse=True)
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model)
    assert isinstance(optimizer, RestAndTables)
    assert isinstance(optimizer.parts[1], RowwiseAdagrad)
    for ids in IDS:
        optimizer.zero_grad()
        wrapped(ids[rank]).backward()
        optimizer.step()
    return model, expected(other, optimizer_of(other))


WAYS: dict[str, Callable[[int], tuple[Model, dict[str, Tensor]]]] = {
    "rows by DTensor": rows_by_dtensor,
    "FSDP2, untied": lambda rank: by_fsdp(rank, False),
    "FSDP2, tied": lambda rank: by_fsdp(rank, True),
    "DDP, sparse": lambda rank: sparse_by_ddp(rank, False),
    "DDP, sparse bands": lambda rank: sparse_by_ddp(rank, True),
}


def in_a_process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for name, way in WAYS.items():
        model, reference = way(rank)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(whole(value), reference[key], rtol=1e-6, atol=1e-9, msg=f"{name}: {key}")
        if rank == 0:
            Path(folder, name).touch()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(in_a_process, (port, str(tmp_path)), nprocs=2)
    assert {path.name for path in tmp_path.iterdir()} == set(WAYS)
