"""A temporal convolutional network as a context model, in one file: python examples/tcn.py

Bai, Kolter & Koltun, "An Empirical Evaluation of Generic Convolutional and Recurrent Networks for Sequence Modeling",
2018. A block has two causal convolutions with weight normalisation and a residual connection; each block looks twice
as far back as the one before. What a convolution needs of the past is its state. The text comes with the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine import StandardMap, register_context, train
from torchdefine.config import Config, rate, setting


class CausalConvolution(nn.Module):
    """(B, T, input) and the inputs before → (B, T, width) and the last inputs; every ``dilation``-th is seen."""

    def __init__(self, input_dim: int, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.direction = nn.Parameter((2 / (kernel * input_dim)) ** 0.5 * torch.randn(width, input_dim, kernel))
        self.size = nn.Parameter(self.direction.detach().norm(dim=(1, 2), keepdim=True))
        self.bias = nn.Parameter(torch.zeros(width))
        self.dilation, self.reach = dilation, (kernel - 1) * dilation

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat((past, x), dim=1)  # (B, reach + T, input)
        weight = self.direction * (self.size / self.direction.norm(dim=(1, 2), keepdim=True))
        y = F.conv1d(whole.transpose(1, 2), weight, self.bias, dilation=self.dilation)
        return y.transpose(1, 2), whole[:, whole.shape[1] - self.reach :]


class Block(nn.Module):
    """Two convolutions, each with ReLU and dropout, and a skip connection around both."""

    def __init__(self, input_dim: int, width: int, kernel: int, dilation: int, dropout: float) -> None:
        super().__init__()
        self.first = CausalConvolution(input_dim, width, kernel, dilation)
        self.second = CausalConvolution(width, width, kernel, dilation)
        self.skip = None if input_dim == width else nn.Linear(input_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        hidden, kept = x, []
        for convolution, before in zip((self.first, self.second), past, strict=True):
            hidden, last = convolution(hidden, before.to(hidden.dtype))
            hidden = self.dropout(F.relu(hidden))
            kept.append(last.detach().to(before.dtype))
        return F.relu(hidden + (x if self.skip is None else self.skip(x))), kept


@dataclass(frozen=True)
class TCNConfig(Config):
    """Dilated causal convolutions."""

    kind: str = "tcn"
    hidden_dim: int = setting(128, "Width of all blocks but the last, which is as wide as a tied table.", at_least=1)
    levels: int = setting(2, "Blocks; each looks twice as far back as the one before.", at_least=1, at_most=16)
    kernel: int = setting(3, "Inputs that a convolution sees.", at_least=1)
    dropout: float = rate("Dropout rate within the blocks.")

    def build(self, input_dim: int, tied_dim: int | None) -> TCN:
        widths = [self.hidden_dim] * (self.levels - 1) + [tied_dim or self.hidden_dim]
        return TCN(input_dim, widths, self.kernel, self.dropout)


class TCN(nn.Module):
    """(B, T, input_dim) → (B, T, last width)."""

    step_length = None

    def __init__(self, input_dim: int, widths: Sequence[int], kernel: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.input_dim, self.output_dim = input_dim, widths[-1]
        inputs = (input_dim, *widths)
        self.blocks = nn.ModuleList(
            Block(inputs[level], width, kernel, 2**level, dropout) for level, width in enumerate(widths)
        )

    def initial_state(self, batch_size: int) -> list[Tensor]:
        convolutions: Any = [one for block in self.blocks for one in (block.first, block.second)]
        return [one.bias.new_zeros(batch_size, one.reach, one.direction.shape[1]) for one in convolutions]

    def forward(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        after: list[Tensor] = []
        for level, block in enumerate(self.blocks):
            x, last = block(x, state[2 * level : 2 * level + 2])
            after += last
        return x, after

    step = forward

    def state_tensors(self) -> dict[str, int]:
        return {f"inputs_{block}_{place}": 1 for block in range(len(self.blocks)) for place in (1, 2)}

    def describe(self) -> str:
        return f"a TCN of {len(self.blocks)} blocks"


def published_parameters() -> int:
    """The Penn Treebank: a tied table 600 wide with biases, 4 blocks 600 wide, kernel 3."""
    with torch.device("meta"):
        table, context = StandardMap(10_000, 600), TCN(600, [600] * 4, kernel=3)
    return sum(p.numel() for part in (table, context) for p in part.parameters()) + 10_000


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    parser.add_argument("--out", default="runs/tcn", help="the run's folder (default: %(default)s)")
    parser.add_argument("--data", default="wikitext-2-shuffled", help="a text (default: the one of the package)")
    options = parser.parse_args(arguments)
    register_context(TCNConfig)
    context = {"kind": "tcn", "hidden_dim": 64, "levels": 2, "kernel": 3}
    run = train("compared/lstm", data=options.data, out=options.out, context=context, train={"steps": options.steps})
    print(run)
    print(f"{published_parameters() / 1e6:.2f} M parameters at the public command's settings for the Penn Treebank.")
    return {"run": run, "published": published_parameters()}


if __name__ == "__main__":
    main()
