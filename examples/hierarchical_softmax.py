"""A hierarchical softmax, registered as an output layer in one file: python examples/hierarchical_softmax.py

Morin & Bengio (AISTATS 2005) and Mnih & Hinton (NeurIPS 2009): words are the leaves of a binary tree, and a word's
probability is the product of the decisions on its way, about log2 V of them instead of V. This tree goes by frequency:
words of about the same rank are neighbours. The text comes with the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine import register_output, train
from torchdefine.config import setting
from torchdefine.embedding import TokenEmbedding, VocabularyFacts
from torchdefine.ops import exact_dtype
from torchdefine.output import OutputConfig, OutputLayer


@dataclass(frozen=True)
class HierarchicalConfig(OutputConfig):
    """A binary tree of decisions with weights of its own."""

    kind: str = "hierarchical"
    tied: str = setting("none", "The inner nodes of a tree are no words, so they share nothing: none.")

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> HierarchicalSoftmax:
        return HierarchicalSoftmax(hidden_dim, vocabulary.size)


class HierarchicalSoftmax(OutputLayer):
    """A complete tree in the order of a heap: node i has the children 2i and 2i + 1, and word w is node V + w."""

    def __init__(self, hidden_dim: int, num_embeddings: int) -> None:
        super().__init__(hidden_dim)
        self.weight = nn.Parameter(torch.empty(num_embeddings - 1, hidden_dim))
        self.bias = nn.Parameter(torch.empty(num_embeddings - 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.hidden_dim**-0.5)
        nn.init.zeros_(self.bias)

    @property
    def num_embeddings(self) -> int:
        return len(self.bias) + 1

    def losses(self, hidden: Tensor, targets: Any) -> Tensor:
        """Only the decisions on the way to each target: (T, depth) of them."""
        node, rows = targets.ids + self.num_embeddings, self._rows(hidden)
        lost = rows.new_zeros(len(rows))
        for _ in range(int(2 * self.num_embeddings - 1).bit_length() - 1):
            parent = node // 2
            inner = (parent - 1).clamp(min=0)
            logit = (rows * self.weight[inner]).sum(-1) + self.bias[inner]
            decision = F.softplus(torch.where(node % 2 == 1, -logit, logit))  # -log of the way that was taken
            lost = lost + torch.where(parent > 0, decision, 0.0)
            node = parent
        return torch.where(targets.counted, lost, 0.0)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Level by level: a node's log-probability is its parent's and the decision for it."""
        logits = F.linear(self._rows(hidden), self.weight, self.bias).to(exact_dtype(hidden))  # (T, V - 1)
        sides = torch.stack((F.logsigmoid(-logits), F.logsigmoid(logits)), -1).flatten(1)  # of nodes 2, 3, … 2V - 1
        level, found, first = logits.new_zeros(len(logits), 1), [], 1
        while 2 * first < 2 * self.num_embeddings:
            own = sides[:, 2 * first - 2 : 4 * first - 2]  # of the nodes of the next level
            level = level.repeat_interleave(2, dim=1)[:, : own.shape[1]] + own
            first *= 2
            found.append(level)
        nodes = torch.cat(found, dim=1)  # of nodes 2, 3, …
        return nodes[:, self.num_embeddings - 2 :].reshape(*hidden.shape[:-1], self.num_embeddings)

    def resize(self, num_embeddings: int) -> None:
        raise NotImplementedError("Another vocabulary has another tree: build a new layer.")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument("--out", default="runs/hierarchical-softmax", help="the run's folder (default: %(default)s)")
    parser.add_argument("--data", default="wikitext-2-shuffled", help="a text (default: the one of the package)")
    options = parser.parse_args(arguments)
    register_output(HierarchicalConfig)
    run = train(
        "compared/lstm",
        data=options.data,
        out=options.out,
        output={"kind": "hierarchical"},
        train={"steps": options.steps},
    )
    print(run)
    own = sum(parameter.numel() for parameter in run.model.output.parameters())
    print(f"{own:,} numbers in the tree: a vector and a bias for each of V - 1 nodes.")
    return {"run": run, "parameters": own}


if __name__ == "__main__":
    main()
