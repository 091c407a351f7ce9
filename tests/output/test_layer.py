"""What holds for every output layer, whatever it is made of."""

from collections.abc import Callable

import pytest
import torch

from torchdefine.embedding import AdaptiveMap, StandardMap
from torchdefine.output import AdaptiveSoftmax, AdaptiveTableSoftmax, FullSoftmax, MixtureSoftmax, OutputLayer

V, WIDTH, CUTOFFS = 40, 8, (10, 25)

LAYERS: dict[str, Callable[[], OutputLayer]] = {
    "full": lambda: FullSoftmax(WIDTH, num_embeddings=V),
    "full, tied": lambda: FullSoftmax(WIDTH, StandardMap(V, 6)),
    "adaptive": lambda: AdaptiveSoftmax.untied(WIDTH, V, CUTOFFS, 2),
    "adaptive, tied": lambda: AdaptiveSoftmax(WIDTH, AdaptiveMap(V, 6, CUTOFFS, division=2)),
    "bands of a table": lambda: AdaptiveTableSoftmax(WIDTH, StandardMap(V, 6), CUTOFFS),
    "mixture": lambda: MixtureSoftmax(WIDTH, FullSoftmax(6, num_embeddings=V), 3),
    "adaptive mixture": lambda: MixtureSoftmax(WIDTH, AdaptiveSoftmax.untied(6, V, CUTOFFS, 2), 3),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_most_probable_keeps_no_graph(kind: str) -> None:
    layer, hidden = LAYERS[kind](), torch.randn(2, 3, WIDTH, requires_grad=True)
    assert layer.log_prob(hidden).requires_grad
    values, ids = layer.top_k(hidden, 4)
    assert not values.requires_grad
    assert not ids.requires_grad
    assert not layer.predict(hidden).requires_grad
    assert torch.equal(ids[..., 0], layer.predict(hidden))
