"""A gated convolutional context model, registered in one file: python examples/gated_convolution.py

Dauphin et al., "Language Modeling with Gated Convolutional Networks", ICML 2017. Layers are causal convolutions with
gated linear units, weight normalisation and residual connections. What a layer needs of the past is its state, so the
model reads on from segment to segment as an LSTM does. The text comes with the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine import StandardMap, register_context, train
from torchdefine.config import Config, setting

WIKITEXT_103 = ((850, 6),) * 3 + ((850, 1),) + ((850, 5),) * 4 + ((850, 1),) + ((850, 4),) * 3 + ((1024, 4), (2048, 4))
"""Width and kernel of each layer of GCNN-14, as fairseq has them in fconv_lm_dauphin_wikitext103."""


class GatedLayer(nn.Module):
    """(B, T, input) and the (kernel - 1) inputs before → (B, T, width) and the last inputs."""

    def __init__(self, input_dim: int, width: int, kernel: int) -> None:
        super().__init__()
        std = (4 * 0.9 / (kernel * input_dim)) ** 0.5  # so that the gates do not shrink the signal
        self.direction = nn.Parameter(std * torch.randn(2 * width, input_dim, kernel))
        self.size = nn.Parameter(self.direction.detach().norm(dim=(1, 2), keepdim=True))
        self.bias = nn.Parameter(torch.zeros(2 * width))
        self.skip = None if input_dim == width else nn.Linear(input_dim, width)
        self.reach = kernel - 1

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat((past, x), dim=1)  # (B, reach + T, input)
        weight = self.direction * (self.size / self.direction.norm(dim=(1, 2), keepdim=True))
        gated = F.glu(F.conv1d(whole.transpose(1, 2), weight, self.bias), dim=1).transpose(1, 2)  # (B, T, width)
        kept = x if self.skip is None else self.skip(x)
        return (gated + kept) * 0.5**0.5, whole[:, whole.shape[1] - self.reach :]


@dataclass(frozen=True)
class GatedConfig(Config):
    """Gated convolutions over the positions before."""

    kind: str = "gated-convolution"
    widths: tuple[int, ...] = setting((128, 128), "Width of each layer.", at_least=1)
    kernels: tuple[int, ...] = setting((4, 4), "Positions that each layer sees, its own included.", at_least=1)

    def build(self, input_dim: int, tied_dim: int | None) -> GatedConvolution:
        return GatedConvolution(input_dim, self.widths, self.kernels)


class GatedConvolution(nn.Module):
    """(B, T, input_dim) → (B, T, last width); one linear layer brings inputs to the first width."""

    step_length = None

    def __init__(self, input_dim: int, widths: Sequence[int], kernels: Sequence[int]) -> None:
        super().__init__()
        self.input_dim, self.output_dim = input_dim, widths[-1]
        self.first = nn.Linear(input_dim, widths[0])
        sizes = zip(pairwise((widths[0], *widths)), kernels, strict=True)
        self.layers = nn.ModuleList(GatedLayer(before, width, kernel) for (before, width), kernel in sizes)

    def initial_state(self, batch_size: int) -> list[Tensor]:
        layers: Any = self.layers
        return [one.bias.new_zeros(batch_size, one.reach, one.direction.shape[1]) for one in layers]

    def forward(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        hidden, after = self.first(x), []
        for layer, past in zip(self.layers, state, strict=True):
            hidden, last = layer(hidden, past.to(hidden.dtype))
            after.append(last.detach().to(past.dtype))
        return hidden, after

    step = forward

    def state_tensors(self) -> dict[str, int]:
        return {f"inputs_{layer}": 1 for layer in range(len(self.layers))}

    def describe(self) -> str:
        return f"{len(self.layers)} gated convolutions"


def published_parameters() -> int:
    """GCNN-14 on WikiText-103: a table 280 wide, the layers, and an adaptive softmax with tails 4 times narrower."""
    with torch.device("meta"):
        table, context = StandardMap(267_735, 280), GatedConvolution(280, *zip(*WIKITEXT_103, strict=True))
        softmax = nn.AdaptiveLogSoftmaxWithLoss(2048, 267_735, [10_000, 20_000, 200_000])
    return sum(p.numel() for part in (table, context, softmax) for p in part.parameters())


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument("--out", default="runs/gated-convolution", help="the run's folder (default: %(default)s)")
    parser.add_argument("--data", default="wikitext-2-shuffled", help="a text (default: the one of the package)")
    options = parser.parse_args(arguments)
    register_context(GatedConfig)
    context = {"kind": "gated-convolution", "widths": [64, 64, 128], "kernels": [4, 4, 3]}
    run = train("compared/lstm", data=options.data, out=options.out, context=context, train={"steps": options.steps})
    print(run)
    print(f"{published_parameters() / 1e6:.1f} M parameters at the published settings; 229 M are published.")
    return {"run": run, "published": published_parameters()}


if __name__ == "__main__":
    main()
