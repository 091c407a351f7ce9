"""The output layer alone, forward and backward: from hidden vectors to a loss over 267,735 words.

Adaptive softmax: ours, tied to the map, beside torch's. Full softmax: ours in chunks, all logits at once, and the fused
kernels of cut-cross-entropy and Liger where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring import Contestant, Group, Prepared, Setting, Work, times_faster, times_the_memory
from benchmarks.plain_step import TorchAdaptiveLoss
from benchmarks.recorded import recorded
from benchmarks.records import Benchmark
from benchmarks.steps import NO_GPU
from benchmarks.texts import WIKIPEDIA_CUTOFFS, WIKIPEDIA_SIZE, real_text
from torchdefine.embedding import AdaptiveMap, StandardMap
from torchdefine.output import AdaptiveSoftmax, FullSoftmax, OutputLayer
from torchdefine.training.cuda_graphs import room_for
from torchdefine.training.precision import Precision

WIDTH = 128
SHAPE = (60, 150)  # 9,000 tokens
TORCHS = "torch's AdaptiveLogSoftmaxWithLoss, division 4"
OURS = "ours, adaptive, recorded"


class OurLoss(nn.Module):
    """One of our layers, told on the host how many targets each band has, as the training step does it."""

    def __init__(self, output: OutputLayer, targets: Tensor, roomy: bool, tied: nn.Module) -> None:
        super().__init__()
        self.output, self.tied = output, tied  # tied tables train, and are no part of the output layer itself
        hint = output.host_hint(targets.cpu().numpy())
        self.hint = tuple(map(room_for, hint)) if hint is not None and roomy else hint

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.output.loss(hidden, targets, hint=self.hint)


class AllLogits(nn.Module):
    """The textbook's way: every logit of every token, in memory, with its gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, WIDTH) * WIDTH**-0.5)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight).float(), targets)


class CutCrossEntropy(AllLogits):
    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        loss: Tensor = linear_cross_entropy(hidden.bfloat16(), self.weight.bfloat16(), targets)
        return loss


class LigerCrossEntropy(AllLogits):
    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss: Tensor = LigerFusedLinearCrossEntropyLoss()(self.weight, hidden, targets)
        return loss


def both_passes(module: nn.Module, hidden: Tensor, targets: Tensor, precision: Precision) -> Callable[[], Tensor]:
    hidden = hidden.detach().clone().requires_grad_()

    def work() -> Tensor:
        hidden.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        with precision.autocast():
            loss: Tensor = module(hidden, targets)
        loss.backward()
        return loss.detach()

    return work


def prepared(make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], setting: Setting, kept: bool) -> Prepared:
    hidden, targets = data
    precision = Precision("bf16", setting.device)
    torch.manual_seed(2)
    with setting.device:
        module = make()
    work: Work = both_passes(module, hidden, targets, precision)
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in module.parameters())}
    with precision.matmul_mode():
        work = recorded(work) if kept else work
    return Prepared(work, lambda: facts, precision.matmul_mode)


def adaptive(size: int, cutoffs: tuple[int, ...], division: int, targets: Tensor, roomy: bool) -> nn.Module:
    table = AdaptiveMap(size, WIDTH, cutoffs, division)
    table.reset_parameters(WIDTH**-0.5)
    return OurLoss(AdaptiveSoftmax(WIDTH, table), targets, roomy, table)


def full(size: int, targets: Tensor) -> nn.Module:
    table = StandardMap(size, WIDTH)
    table.reset_parameters(WIDTH**-0.5)
    return OurLoss(FullSoftmax(WIDTH, table, bias=False), targets, False, table)


def data_of(setting: Setting) -> tuple[int, tuple[int, int, int], tuple[Tensor, Tensor]]:
    """The vocabulary's size and cutoffs; hidden vectors (T, n) and targets (T,)."""
    text, device = real_text(setting.data), setting.device
    generator = torch.Generator(device).manual_seed(0)
    if setting.small:
        size, cutoffs, targets = 20_000, (2000, 5000, 10_000), text.ids((8, 64), device, 20_000).flatten()
    else:
        size, cutoffs = WIKIPEDIA_SIZE, WIKIPEDIA_CUTOFFS
        targets = text.wide_ids(SHAPE, device, size).flatten()
    hidden = torch.randn(len(targets), WIDTH, device=device, generator=generator)
    return size, cutoffs, (hidden, targets)


def missing(package: str, setting: Setting) -> str:
    if find_spec(package) is None:
        return f"the package {package} is not installed"
    return "" if setting.on_gpu else NO_GPU


def groups(setting: Setting) -> Iterator[Group]:
    size, cutoffs, data = data_of(setting)
    targets = data[1]
    make = partial(prepared, data=data, setting=setting, kept=False)
    record = partial(prepared, data=data, setting=setting, kept=True)
    no_gpu = "" if setting.on_gpu else NO_GPU
    bands = torch.bucketize(targets, torch.tensor(cutoffs, device=targets.device), right=True).bincount(minlength=4)
    shares = " / ".join(f"{100 * share / len(targets):.1f}" for share in bands.tolist())
    note = f"{len(targets):,} tokens, {WIDTH} wide, {size:,} types, {shares} % of the tokens in the four bands"
    yield Group(
        "adaptive softmax",
        [
            Contestant(TORCHS, partial(make, lambda: TorchAdaptiveLoss(WIDTH, size, cutoffs, 4.0))),
            Contestant(
                "torch's AdaptiveLogSoftmaxWithLoss, division 1",
                partial(make, lambda: TorchAdaptiveLoss(WIDTH, size, cutoffs, 1.0)),
            ),
            Contestant(
                "ours, adaptive, kernel by kernel", partial(make, lambda: adaptive(size, cutoffs, 4, targets, False))
            ),
            Contestant(OURS, partial(record, lambda: adaptive(size, cutoffs, 4, targets, True)), no_gpu),
            Contestant(
                "ours, adaptive, division 1, recorded",
                partial(record, lambda: adaptive(size, cutoffs, 1, targets, True)),
                no_gpu,
            ),
        ],
        [times_faster(OURS, TORCHS, 2.5), times_the_memory(OURS, TORCHS, 1.0)],
        note,
    )
    yield Group(
        "full softmax",
        [
            Contestant("all logits, F.cross_entropy", partial(make, lambda: AllLogits(size))),
            Contestant("ours, in chunks", partial(make, lambda: full(size, targets))),
            Contestant("ours, in chunks, recorded", partial(record, lambda: full(size, targets)), no_gpu),
            Contestant(
                "cut-cross-entropy", partial(make, lambda: CutCrossEntropy(size)), missing("cut_cross_entropy", setting)
            ),
            Contestant(
                "Liger's fused linear cross entropy",
                partial(make, lambda: LigerCrossEntropy(size)),
                missing("liger_kernel", setting),
            ),
        ],
        note=note,
    )


BENCHMARK = Benchmark("output", "adaptive and full softmax beside torch's and other people's kernels", groups)
