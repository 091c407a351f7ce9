"""Your own LSTM classifier, before and after `replace_embeddings`: python examples/lstm_classifier.py

It learns to tell real sentences from the same words in random order. The second model differs from the first in one
line. The text comes with the package.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchdefine import replace_embeddings
from torchdefine.data import find_splits, read_text, resolve_corpus

LENGTH = 24
PAD, UNKNOWN = 0, 1


class Classifier(nn.Module):
    """Words in, one number out: how much the sentence looks shuffled."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=PAD)
        self.lstm = nn.LSTM(width, 128, batch_first=True)
        self.out = nn.Linear(128, 1)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(ids))  # (B, T, 128)
        return self.out(states.mean(1)).squeeze(-1)  # (B,)


def sentences(split: str, limit: int) -> list[list[str]]:
    """Sentences of the shipped text, 6 to LENGTH words long."""
    found: list[list[str]] = []
    for path in find_splits(resolve_corpus("wikitext-2-shuffled"))[split]:
        for block in read_text(path):
            for line in block.lines:
                found += [part.split() for part in line.split(" . ") if 6 <= len(part.split()) <= LENGTH]
            if len(found) >= limit:
                return found[:limit]
    return found


def encode(words: Sequence[Sequence[str]], ids: dict[str, int]) -> Tensor:
    table = torch.full((len(words), LENGTH), PAD)
    for row, sentence in enumerate(words):
        table[row, : len(sentence)] = torch.tensor([ids.get(word, UNKNOWN) for word in sentence])
    return table  # (sentences, T)


def shuffled_half(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Half of the sentences with their words in random order, and which ones."""
    labels = torch.rand(len(ids), generator=generator) < 0.5
    ids = ids.clone()
    for row in labels.nonzero().flatten():
        words = int((ids[row] != PAD).sum())
        ids[row, :words] = ids[row, torch.randperm(words, generator=generator)]
    return ids, labels.float()


def train(model: nn.Module, ids: Tensor, steps: int, batch: int = 64) -> None:
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(len(ids), (batch,), generator=generator)
        inputs, labels = shuffled_half(ids[rows], generator)
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@torch.no_grad()
def accuracy(model: nn.Module, ids: Tensor) -> float:
    inputs, labels = shuffled_half(ids, torch.Generator().manual_seed(1))
    return float(((model(inputs) > 0) == labels.bool()).float().mean())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="training steps of each model (default: 800)")
    parser.add_argument("--sentences", type=int, default=30_000, help="training sentences (default: 30000)")
    options = parser.parse_args(arguments)

    texts = sentences("train", options.sentences)
    counts = Counter(word for sentence in texts for word in sentence)
    ids = {word: number for number, (word, _) in enumerate(counts.most_common(), start=2)}
    train_ids, test_ids = encode(texts, ids), encode(sentences("test", 2_000), ids)

    results = {}
    for name in ("nn.Embedding", "DeFINE"):
        torch.manual_seed(0)
        model = Classifier(words=len(ids) + 2, width=256)
        if name == "DeFINE":
            print(replace_embeddings(model, map_dim=32, expand_dim=256, depth=3))  # the one line
        train(model, train_ids, options.steps)
        results[f"{name} parameters"] = sum(parameter.numel() for parameter in model.parameters())
        results[f"{name} accuracy"] = accuracy(model.eval(), test_ids)
        print(f"{name}: {results[f'{name} parameters']:,} parameters, accuracy {results[f'{name} accuracy']:.1%}")
    return results


if __name__ == "__main__":
    main()
