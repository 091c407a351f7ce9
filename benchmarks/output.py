"""The output layer alone, forward and backward: from hidden vectors to a loss over 267,735 words.

Adaptive softmax: ours, tied to the map, beside torch's. Full softmax: ours in chunks, all logits at once, and the fused
kernels of cut-cross-entropy and Liger where they are installed. Ties: what the vectors of all words cost in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
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
from torchdefine.embedding import AdaptiveMap, ProjectionConfig, StandardMap, VocabularyFacts, build_embedding
from torchdefine.modes import prepare
from torchdefine.output import AdaptiveSoftmax, AdaptiveTableSoftmax, FullSoftmax, OutputLayer
from torchdefine.recipe import load_recipe
from torchdefine.training.cuda_graphs import room_for
from torchdefine.training.precision import Precision

WIDTH = 128
SHAPE = (60, 150)  # 9,000 tokens
TORCHS = "torch's AdaptiveLogSoftmaxWithLoss, division 4"
OURS = "ours, adaptive, recorded"
TABLE, WIDE = "a table of n, behind a projection", "a table of m"
FINISHED, PROJECTED = "finished vectors of the unit", "finished vectors of one projection"
DROPOUT = 0.2
DROPPED, BANDS = f"finished vectors of the unit, dropout {DROPOUT}", "finished vectors of the unit, in bands"
TIES = (TABLE, WIDE, FINISHED, PROJECTED, DROPPED, BANDS)
TIED_SIZES = (
    ("ptb/awd-lstm-define-finished", (10_000, (20, 70)), (1000, (4, 20))),
    ("txl/define-64", (253_443, SHAPE), (3000, (4, 20))),
)
"""A recipe, its vocabulary with a batch of tokens, and smaller ones."""


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


def tied(recipe: Any, size: int, how: str, targets: Tensor) -> nn.Module:
    """A layer over what ``how`` says of a recipe's embedding."""
    unit = replace(recipe.unit, dropout=DROPOUT) if how == DROPPED else recipe.unit
    if how == PROJECTED:
        unit = ProjectionConfig(embedding_dim=recipe.unit.embedding_dim)
    embedding = build_embedding(recipe.embedding, unit, VocabularyFacts(size))
    width = embedding.embedding_dim
    layers: dict[str, Callable[[], OutputLayer]] = {
        TABLE: lambda: FullSoftmax(width, StandardMap(size, embedding.map_dim)),
        WIDE: lambda: FullSoftmax(width, StandardMap(size, width)),
        BANDS: lambda: AdaptiveTableSoftmax(
            width, embedding, tuple(c for c in WIKIPEDIA_CUTOFFS if c < size) or (size // 5,)
        ),
    }
    output: Any = layers.get(how, lambda: FullSoftmax(width, embedding))()
    module = OurLoss(output, targets, True, output._map[0] if how in (TABLE, WIDE) else embedding)
    prepare(module)
    return module


def ties(setting: Setting, name: str, size: int, shape: tuple[int, int]) -> Group:
    recipe, text = load_recipe(name), real_text(setting.data)
    small = size <= text.vocabulary
    targets = (text.ids(shape, setting.device, size) if small else text.wide_ids(shape, setting.device, size)).flatten()
    generator = torch.Generator(setting.device).manual_seed(0)
    hidden = torch.randn(len(targets), recipe.unit.embedding_dim, device=setting.device, generator=generator)
    make = partial(prepared, data=(hidden, targets), setting=setting, kept=setting.on_gpu)
    contestants = [Contestant(how, partial(make, partial(tied, recipe, size, how, targets))) for how in TIES]
    sizes = f"{size:,} words, a table {recipe.embedding.map_dim} wide, vectors of {recipe.unit.embedding_dim}"
    note = f"{len(targets):,} tokens, {sizes}, the unit of {name}{', recorded' if setting.on_gpu else ''}"
    return Group(f"ties over {size:,} words", contestants, note=note)


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
    for name, (size, shape), (fewer, shorter) in TIED_SIZES:
        batch = shape if setting.on_gpu or size <= 10_000 else shorter  # a CPU would take minutes
        yield ties(setting, name, *((fewer, shorter) if setting.small else (size, batch)))


BENCHMARK = Benchmark("output", "adaptive and full softmax beside torch's and other people's kernels", groups)
