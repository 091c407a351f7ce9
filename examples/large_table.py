"""Train a table too large for one machine: its rows split over processes, checkpoints, and going on after a kill.

torchrun --nproc-per-node 2 examples/large_table.py --rows 10000000 --out run

Every process has its part of each batch and 1 / processes of the rows; DTensor sends ids to where their rows are. Run
the same command again after a kill, also with another number of processes: a checkpoint fits any.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from torchdefine import DeFINE


def sharded(rows: int, device: str) -> nn.Module:
    """A model that never stood in one memory: no process has more than its own rows."""
    with torch.device("meta"):
        model = nn.Sequential(DeFINE(rows, 64, map_dim=16, expand_dim=64), nn.Linear(64, 1))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    plan = {"0.map.table": RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))}
    parallelize_module(model, mesh, plan).to_empty(device=device)
    torch.manual_seed(0)  # the unit and the head start the same everywhere, and rows differ from process to process
    model[0].unit.reset_parameters()
    model[1].reset_parameters()
    torch.manual_seed(1 + dist.get_rank())
    nn.init.normal_(model[0].map.table.weight.to_local())
    return model


def batch(step: int, rows: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """This process's part of the ids of a step, low ones more often, and a bit for each to learn by heart."""
    draw = torch.Generator().manual_seed(step)
    ids = (rows ** torch.rand(size, generator=draw, dtype=torch.float64)).long() - 1
    own = ids.chunk(dist.get_world_size())[dist.get_rank()].to(device)
    return own, (own * 2_654_435_761 >> 9 & 1).float()


def train(model: nn.Module, options: argparse.Namespace) -> None:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, foreach=False)
    saved = [int(folder.parent.name) for folder in options.out.glob("*/.metadata")]  # written when all else is
    if saved:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=options.out / str(max(saved)))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(max(saved, default=0), options.steps):
        ids, bits = batch(step, options.rows, options.batch, options.device)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(ids).squeeze(1), bits) / dist.get_world_size()
        loss.backward()
        for parameter in model.parameters():  # a row's gradient is whole already
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.9f}", flush=True)
        if (step + 1) % options.save_every == 0:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(state, checkpoint_id=options.out / str(step + 1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    try:
        train(sharded(options.rows, options.device), options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
