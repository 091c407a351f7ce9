"""A model of clicks over hashed ids and bags: DeFINE beside tables of as many bytes. python examples/click_model.py

Somebody with a history of eight items sees another one: is it clicked? The data are made here: items have a taste of
eight numbers around one of 50 centres, and a few are far more popular than the rest. Ids are hashed into rows. In the
same bytes a full table has fewer rows, so more items share one.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine import DeFINEBag, StandardMap, replace_embeddings
from torchdefine.embedding import TokenEmbedding
from torchdefine.training import RowwiseAdagrad

WIDTH, NARROW, HISTORY, TASTE = 32, 8, 8, 8
STD = 0.1  # of fresh vectors


class Impressions(NamedTuple):
    history: Tensor  # (N, HISTORY)
    item: Tensor  # (N, 1)
    clicked: Tensor  # (N,)


def impressions(count: int, items: int) -> Impressions:
    draw = torch.Generator().manual_seed(1)
    centres = torch.randn(50, TASTE, generator=draw)
    tastes = centres[torch.randint(50, (items,), generator=draw)] + 0.3 * torch.randn(items, TASTE, generator=draw)
    appeal = 0.5 * torch.randn(items, generator=draw)
    seen = (items ** torch.rand(count, HISTORY + 1, generator=draw, dtype=torch.float64)).long() - 1  # low ones often
    history, item = seen[:, :HISTORY], seen[:, HISTORY:]
    liking = 2 * (tastes[history].mean(1) * tastes[item[:, 0]]).sum(1) + appeal[item[:, 0]] - 1
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


def full_table(rows: int) -> ClickModel:
    bag = nn.EmbeddingBag(rows, WIDTH, mode="mean", sparse=True)
    nn.init.normal_(bag.weight, std=STD)
    return ClickModel(bag)


def with_define(rows: int) -> ClickModel:
    model = full_table(rows)
    replace_embeddings(model, map_dim=NARROW, expand_dim=4 * WIDTH)  # vectors start as large as the table's
    return model


def narrow_table(rows: int) -> ClickModel:
    projection = nn.Linear(NARROW, WIDTH, bias=False)
    nn.init.normal_(projection.weight, std=STD / NARROW**0.5)
    return ClickModel(DeFINEBag(TokenEmbedding(StandardMap(rows, NARROW, sparse=True), projection, WIDTH), "mean"))


def train(model: ClickModel, data: Impressions, rate: float) -> None:
    """One pass; a row that a batch does not need is not touched."""
    tables = [part.weight for part in model.bag.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    rest = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = RowwiseAdagrad(tables, lr=rate), torch.optim.Adam(rest, lr=2e-3)
    for history, item, clicked in zip(*(part.split(1024) for part in data), strict=True):
        loss = F.binary_cross_entropy_with_logits(model(history, item), clicked)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


@torch.no_grad()
def auc(model: ClickModel, data: Impressions) -> float:
    """How often a clicked impression is ranked above one that is not."""
    batches = zip(data.history.split(8192), data.item.split(8192), strict=True)
    clicked = data.clicked[torch.cat([model(*batch) for batch in batches]).argsort()].bool()
    ranks = torch.arange(1, len(clicked) + 1, dtype=torch.float64)
    yes, no = int(clicked.sum()), int((~clicked).sum())
    return (float(ranks[clicked].sum()) - yes * (yes + 1) / 2) / (yes * no)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--impressions", type=int, default=300_000, help="to learn from")
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--rows", type=int, default=32_768, help="of DeFINE's table")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1.5, 5.0, 15.0], help="of the tables; the best counts"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tenth = options.impressions // 10
    data = impressions(options.impressions + 2 * tenth, options.items)
    parts = zip(*(part.split([options.impressions, tenth, tenth]) for part in data), strict=True)
    learnt, choosing, held_out = (Impressions(*part) for part in parts)
    size = sum(p.numel() for p in with_define(options.rows).bag.parameters())
    results: dict[str, dict[str, float]] = {}
    for name, make, rows in (
        ("DeFINE", with_define, options.rows),
        ("full table", full_table, size // WIDTH),
        ("narrow table", narrow_table, (size - NARROW * WIDTH) // NARROW),
    ):
        tried = []
        for rate in options.rates:
            torch.manual_seed(options.seed)
            model = make(rows)
            train(model, learnt, rate)
            tried.append((auc(model.eval(), choosing), auc(model, held_out), rate))
        _, reached, rate = max(tried)
        stored = sum(p.numel() * p.element_size() for p in model.bag.parameters())
        print(f"{name}: {rows:,} rows, {stored:,} bytes, AUC {reached:.4f} with the rate {rate}", flush=True)
        results[name] = {"rows": rows, "bytes": stored, "rate": rate, "AUC": reached}
    return results


if __name__ == "__main__":
    main()
