"""What an output layer's own parameters start as, and that they can be drawn again."""

from collections.abc import Callable

import pytest
import torch

from torchdefine.embedding import AdaptiveMap, ProjectiveMap, StandardMap
from torchdefine.output import AdaptiveSoftmax, AdaptiveTableSoftmax, FullSoftmax, OutputLayer

V, WIDTH, CUTOFFS = 400, 64, (100, 200)

UNTIED: dict[str, Callable[[], OutputLayer]] = {
    "full": lambda: FullSoftmax(WIDTH, num_embeddings=V),
    "adaptive": lambda: AdaptiveSoftmax.untied(WIDTH, V, CUTOFFS),
}
PROJECTED: dict[str, Callable[[], OutputLayer]] = {
    "full, tied": lambda: FullSoftmax(WIDTH, StandardMap(V, 16)),
    "adaptive, tied": lambda: AdaptiveSoftmax(WIDTH, AdaptiveMap(V, 16, CUTOFFS)),
    "bands of a table": lambda: AdaptiveTableSoftmax(WIDTH, StandardMap(V, 16), CUTOFFS),
}


@pytest.mark.parametrize("kind", UNTIED)
def test_own_tables_start_with_logits_of_unit_variance(kind: str) -> None:
    log_probs = UNTIED[kind]().log_prob(torch.randn(300, WIDTH))
    for band in log_probs.tensor_split(CUTOFFS, dim=1):
        assert 0.8 < band.std(dim=1).mean() < 1.25


def test_projections_keep_the_variance_of_hidden_vectors() -> None:
    layer = PROJECTED["bands of a table"]()
    projected = [projection(torch.randn(300, WIDTH)) for projection in layer.projections.values()]
    assert len(projected) == 3
    assert all(0.8 < vectors.std() < 1.25 for vectors in projected)


def test_what_stands_beside_a_table_is_drawn_like_it() -> None:
    cutoffs = range(10, V, 10)
    table = ProjectiveMap(V, 16, WIDTH)
    table.projection_std = 0.02
    bands = AdaptiveMap(V, 16, cutoffs, division=1)
    for map_layer in (table, bands):
        map_layer.reset_parameters(std=0.3)
    of_table, of_bands = AdaptiveTableSoftmax(WIDTH, table, cutoffs), AdaptiveSoftmax(16, bands)
    for layer in (of_table, of_bands):
        assert layer.cluster_weight.std().item() == pytest.approx(0.3, rel=0.2)
    for projection in of_table.projections.parameters():
        assert projection.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("kind", [*UNTIED, *PROJECTED])
def test_reset_draws_every_parameter_again(kind: str) -> None:
    layer = {**UNTIED, **PROJECTED}[kind]()
    started = {name: value.clone() for name, value in layer.named_parameters()}
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    layer.reset_parameters()  # type: ignore[operator]
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.std(), started[name].std(), rtol=0.5, atol=0, msg=name)
        assert parameter.mean().abs() < 1, name
