"""Word vectors from characters, registered as an embedding in one file: python examples/character_cnn.py

Kim, Jernite, Sontag & Rush, "Character-Aware Neural Language Models", AAAI 2016. Convolutions over the characters of a
word, the largest value of each filter, and highway layers give the word's vector; no table grows with the vocabulary.
The text comes with the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine import load_recipe, register_embedding, train
from torchdefine.config import setting
from torchdefine.context import LSTM, LSTMConfig
from torchdefine.embedding import MapConfig, VocabularyFacts
from torchdefine.task import find_task

START, END, SYMBOLS = 1, 2, 259
"""Around a word, and how many symbols there are: none, these two, and 256 bytes."""


def spelled(words: Sequence[str], length: int) -> Tensor:
    """(V, length): the bytes of each word between a start and an end, then zeros; the rest of long words is cut off."""
    table = torch.zeros(len(words), length, dtype=torch.int16)
    for row, word in enumerate(words):
        symbols = [START, *(3 + byte for byte in word.encode()[: length - 2]), END]
        table[row, : len(symbols)] = torch.tensor(symbols)
    return table


@dataclass(frozen=True)
class CharacterConfig(MapConfig):
    """Convolutions over the characters of words."""

    kind: str = "character-cnn"
    map_dim: int = setting(15, "Width of a character's vector.", at_least=1)
    kernels: tuple[int, ...] = setting((1, 2, 3, 4, 5), "Characters that the filters of each group see.", at_least=1)
    filters: tuple[int, ...] = setting((10, 20, 30, 40, 50), "Filters of each group.", at_least=1)
    highways: int = setting(1, "Highway layers.", at_least=0)
    length: int = setting(20, "Characters of a word that are read, its start and end included.", at_least=3)
    words = None  # no setting, since it has no type
    """Those of the text that is trained on. A saved model has their characters among its weights."""

    def build(self, vocabulary: VocabularyFacts, width: int | None) -> CharacterMap:
        known = self.words is not None and len(self.words) == vocabulary.size
        spelling = spelled(self.words if known else [""] * vocabulary.size, self.length)
        return CharacterMap(spelling, SYMBOLS, self.map_dim, self.kernels, self.filters, self.highways)


class CharacterMap(nn.Module):
    """Ids → vectors as wide as there are filters."""

    padding_idx = None

    def __init__(
        self,
        spelling: Tensor,
        symbols: int,
        map_dim: int,
        kernels: Sequence[int],
        filters: Sequence[int],
        highways: int,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.map_dim, self.output_dim, self.std = len(spelling), map_dim, sum(filters), 1.0
        self.register_buffer("spelling", spelling)
        self.symbols = nn.Embedding(symbols, map_dim, padding_idx=0)
        self.groups = nn.ModuleList(nn.Conv1d(map_dim, f, k) for k, f in zip(kernels, filters, strict=True))
        self.highways = nn.ModuleList(nn.Linear(self.output_dim, 2 * self.output_dim) for _ in range(highways))

    def forward(self, ids: Tensor) -> Tensor:
        types, back = ids.unique(return_inverse=True)  # every word of a batch once
        symbols = self.symbols(self.spelling[types].int()).transpose(1, 2)  # (types, map_dim, length)
        vectors = torch.cat([torch.tanh(group(symbols)).amax(-1) for group in self.groups], dim=-1)
        for highway in self.highways:
            gate, changed = highway(vectors).chunk(2, dim=-1)  # (types, output_dim)
            gate = torch.sigmoid(gate)
            vectors = gate * torch.relu(changed) + (1 - gate) * vectors
        return vectors[back]

    def reset_parameters(self, std: float | None = None) -> None:
        for part in self.modules():
            if part is not self and hasattr(part, "reset_parameters"):
                part.reset_parameters()
        for highway in self.highways:
            nn.init.constant_(highway.bias[: self.output_dim], -2.0)  # carry at first, as the paper does

    def resize(self, num_embeddings: int) -> None:
        raise NotImplementedError("New words need a spelling: build a new map.")

    def to_config(self) -> dict[str, Any]:
        raise NotImplementedError("Save the run; only the library's own maps can be saved by themselves.")


def published_parameters(large: bool = False) -> int:
    """LSTM-Char on the Penn Treebank: 10,000 words of 51 characters, an LSTM of two layers, and a softmax."""
    kernels = range(1, 8 if large else 7)
    filters = [min(200, 50 * k) if large else 25 * k for k in kernels]
    hidden = 650 if large else 300
    with torch.device("meta"):
        words = CharacterMap(torch.zeros(1, 3), 51, 15, kernels, filters, 2 if large else 1)
        context = LSTM(sum(filters), LSTMConfig(layers=2, hidden_dim=hidden))
        parts = (words, context, nn.Linear(hidden, 10_000))
    return sum(p.numel() for part in parts for p in part.parameters())


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument("--out", default="runs/character-cnn", help="the run's folder (default: %(default)s)")
    parser.add_argument("--data", default="wikitext-2-shuffled", help="a text (default: the one of the package)")
    options = parser.parse_args(arguments)
    register_embedding(CharacterConfig)
    recipe = load_recipe("compared/lstm", {"data": {"corpus": options.data}})
    CharacterConfig.words = find_task("language").open_data(recipe, None).tokenization.tokens
    parts = {"embedding": {"kind": "character-cnn"}, "output": {"tied": "none"}}
    run = train("compared/lstm", data=options.data, out=options.out, train={"steps": options.steps}, **parts)
    print(run)
    small, large = published_parameters(), published_parameters(large=True)
    print(f"{small / 1e6:.1f} and {large / 1e6:.1f} M parameters at the published settings; 5 and 19 M are published.")
    return {"run": run, "published": (small, large)}


if __name__ == "__main__":
    main()
