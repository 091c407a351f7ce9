"""One attention layer of the Transformer-XL recipes, forward and backward, beside the way it is usually written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring import Contestant, Group, Prepared, Setting
from benchmarks.plain_transformer_xl import TextbookAttention
from benchmarks.recorded import recorded
from benchmarks.records import Benchmark
from benchmarks.steps import FAMILIES, NO_GPU
from torchdefine.context import TransformerXL
from torchdefine.context.relative_attention import sinusoids
from torchdefine.context.transformer_xl_layer import TransformerXLLayer
from torchdefine.embedding import VocabularyFacts
from torchdefine.modes import prepare as prepare_kernels
from torchdefine.recipe import load_recipe
from torchdefine.tasks.language import build_language_model


def ways(setting: Setting) -> tuple[Tensor, Tensor, dict[str, Callable[[], Tensor]]]:
    """A segment (B, T, d), the memory before it (B, M, d), and both ways to (B, T, d)."""
    family = next(family for family in FAMILIES if family.name == "Transformer-XL")
    recipe = family.recipe(family.without, setting.small)
    streams, length, memory = recipe.train.batch_size, recipe.train.length, recipe.context.memory
    one_layer = {"context": {"memory": memory, "layers": 1}, "output": {"kind": "full"}}
    with setting.device:
        model = build_language_model(load_recipe(family.without, one_layer), VocabularyFacts(1000)).context
    assert isinstance(model, TransformerXL)
    model.eval()  # without dropout, so that the two agree
    prepare_kernels(model)
    model.evaluation = model.reach
    layer = model.layers[0]
    assert isinstance(layer, TransformerXLLayer)
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    own, remembered = (
        torch.randn(streams, count, model.input_dim, device=setting.device, dtype=dtype) for count in (length, memory)
    )
    own.requires_grad_()  # no gradient flows to a memory
    filled = torch.full((1,), memory, device=setting.device)
    textbook = TextbookAttention(layer.attention).to(setting.device, dtype)
    distances = torch.arange(memory + length - 1, -1, -1, device=setting.device)
    vectors = sinusoids(distances, model.input_dim, torch.float32).to(dtype)
    # Of their own, so that no gradient of theirs goes to a tensor that was made before a recording began.
    biases = [bias.detach().to(dtype).requires_grad_() for bias in (model.content_bias, model.distance_bias)]

    def usual() -> Tensor:
        return textbook(torch.cat((remembered, own), dim=1), length, vectors, *biases)

    def ours() -> Tensor:
        return layer.attention(own, remembered, model.surroundings(own, memory, filled))

    return own, remembered, {"textbook": usual, "ours": ours}


def groups(setting: Setting) -> Iterator[Group]:
    torch.manual_seed(0)
    own, remembered, both = ways(setting)

    def prepare(way: Callable[[], Tensor], as_graph: bool) -> Prepared:
        def work() -> None:
            way().sum().backward()

        return Prepared(recorded(work) if as_graph else work)

    contestants = [
        Contestant(name + ", recorded" * as_graph, partial(prepare, way, as_graph), NO_GPU if lacks else "")
        for as_graph in (False, True)
        for name, way in both.items()
        for lacks in (as_graph and not setting.on_gpu,)
    ]
    streams, length, dim = own.shape
    keys = f"keys {streams}×{remembered.shape[1] + length}×{dim}"
    yield Group("attention layer, forward and backward", contestants, note=keys)


BENCHMARK = Benchmark("attention", "an attention layer of Transformer-XL beside the textbook's", groups)
