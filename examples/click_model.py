"""A model of clicks over hashed ids and bags, with DeFINE and with a full table of as many bytes.

python examples/click_model.py

Somebody with a history of eight items sees another one: is it clicked? The data are made here: items have a taste of
eight numbers around one of 300 centres, and a few are far more popular than the rest. Ids are hashed into rows. In the
same bytes a full table has fewer rows, so more items share one.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine import DeFINE, DeFINEBag
from torchdefine.training import RowwiseAdagrad

WIDTH, HISTORY, TASTE = 32, 8, 8


class Impressions(NamedTuple):
    history: Tensor  # (N, HISTORY)
    item: Tensor  # (N, 1)
    clicked: Tensor  # (N,)


def impressions(count: int, items: int) -> Impressions:
    draw = torch.Generator().manual_seed(1)
    centres = torch.randn(300, TASTE, generator=draw)
    tastes = centres[torch.randint(300, (items,), generator=draw)] + 0.3 * torch.randn(items, TASTE, generator=draw)
    appeal = 0.5 * torch.randn(items, generator=draw)
    seen = (items ** torch.rand(count, HISTORY + 1, generator=draw, dtype=torch.float64)).long() - 1  # low ones often
    history, item = seen[:, :HISTORY], seen[:, HISTORY:]
    liking = (tastes[history].mean(1) * tastes[item[:, 0]]).sum(1) + appeal[item[:, 0]] - 1
    return Impressions(history, item, (torch.rand(count, generator=draw) < liking.sigmoid()).float())


def hashed(ids: Tensor, rows: int) -> Tensor:
    return (ids * 0x9E3779B97F4A7C1 >> 20).remainder(rows)


class ClickModel(nn.Module):
    def __init__(self, bag: nn.EmbeddingBag | DeFINEBag) -> None:
        super().__init__()
        self.bag = bag
        self.head = nn.Sequential(nn.Linear(3 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        past, now = (self.bag(hashed(ids, self.bag.num_embeddings)) for ids in (history, item))  # (B, WIDTH) each
        return self.head(torch.cat((past, now, past * now), 1)).squeeze(1)  # (B,)


def train(model: ClickModel, data: Impressions, batch: int, rate: float) -> None:
    """One pass: a row that no impression needs is not touched."""
    tables = [part.weight for part in model.bag.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    rest = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = RowwiseAdagrad(tables, lr=rate), torch.optim.Adam(rest, lr=2e-3)
    for history, item, clicked in zip(*(part.split(batch) for part in data), strict=True):
        loss = F.binary_cross_entropy_with_logits(model(history, item), clicked)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


@torch.no_grad()
def auc(model: ClickModel, data: Impressions) -> float:
    """How often a clicked impression is ranked above one that is not."""
    order = torch.cat([model(*parts) for parts in zip(data.history.split(8192), data.item.split(8192))]).argsort()
    clicked = data.clicked[order].bool()
    ranks = torch.arange(1, len(order) + 1, dtype=torch.float64)
    yes, no = int(clicked.sum()), int((~clicked).sum())
    return (float(ranks[clicked].sum()) - yes * (yes + 1) / 2) / (yes * no)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--impressions", type=int, default=1_000_000, help="to learn from")
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=131_072, help="of DeFINE's table")
    parser.add_argument("--map-dim", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate of the tables")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    held_out = options.impressions // 5
    data = impressions(options.impressions + held_out, options.items)
    learnt, rest = (Impressions(*parts) for parts in zip(*(p.split([options.impressions, held_out]) for p in data)))
    results: dict[str, float] = {}
    torch.manual_seed(options.seed)
    define = DeFINE(options.rows, WIDTH, options.map_dim, 4 * WIDTH, sparse=True)
    numbers = sum(p.numel() for p in define.parameters())
    bags = {
        "DeFINE": DeFINEBag(define, "mean"),
        "full table": nn.EmbeddingBag(numbers // WIDTH, WIDTH, mode="mean", sparse=True),
    }
    for name, bag in bags.items():
        torch.manual_seed(options.seed)
        model = ClickModel(bag)
        train(model, learnt, 1024, options.rate)
        size = sum(p.numel() * p.element_size() for p in bag.parameters())
        results |= {f"{name}, bytes": size, f"{name}, AUC": auc(model.eval(), rest)}
        print(f"{name}: {bag.num_embeddings:,} rows, {size:,} bytes, AUC {results[f'{name}, AUC']:.4f}")
    return results


if __name__ == "__main__":
    main()
