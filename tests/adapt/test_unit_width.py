"""The width of a unit that nobody chose: small for small tables, the paper's for its own, and always one that fits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchdefine import replace_embeddings
from torchdefine.embedding import VARIANTS, UnitConfig, make_plan
from torchdefine.embedding.unit_plan import default_expand_dim, default_map_dim
from torchdefine.errors import UserError


@pytest.mark.parametrize(
    ("embedding_dim", "wanted"), [(16, 16), (64, 16), (65, 32), (300, 80), (384, 96), (512, 128), (4096, 128)]
)
def test_a_map_is_a_quarter_as_wide_and_falls_into_groups(embedding_dim: int, wanted: int) -> None:
    assert default_map_dim(embedding_dim) == wanted
    chosen = default_expand_dim(wanted, embedding_dim, UnitConfig())
    make_plan(wanted, UnitConfig(embedding_dim=embedding_dim, expand_dim=chosen))


@pytest.mark.parametrize(
    ("map_dim", "embedding_dim", "wanted"),
    [
        (64, 128, 512),  # four times the width
        (128, 256, 1024),  # the paper's sizes keep its 1024
        (256, 384, 1024),
        (128, 768, 1024),
        (32, 100, 384),  # 400, rounded down to a multiple of 32
        (128, 16, 128),  # a unit expands: not below the map
        (100, 16, 128),
        (8, 6, 32),
        (2048, 4096, 2048),
    ],
)
def test_four_times_the_width_within_limits(map_dim: int, embedding_dim: int, wanted: int) -> None:
    assert default_expand_dim(map_dim, embedding_dim, UnitConfig()) == wanted


def test_a_width_is_a_number() -> None:
    with pytest.raises(TypeError, match="map_dim must be a whole number, not '64'"):
        replace_embeddings(nn.Sequential(nn.Embedding(9, 8)), map_dim="64")


@given(
    map_dim=st.integers(1, 80).map(lambda n: 4 * n),
    embedding_dim=st.integers(1, 80).map(lambda m: 8 * m),
    depth=st.integers(1, 12),
    variant=st.sampled_from(sorted(VARIANTS)),
    groups=st.sampled_from(["halving", "cycle", "fixed", "dense"]),
    reach=st.booleans(),
)
def test_what_any_other_width_could_do_this_one_can(
    map_dim: int, embedding_dim: int, depth: int, variant: str, groups: str, reach: bool
) -> None:
    unit = UnitConfig.of(variant, embedding_dim=embedding_dim, depth=depth, groups=groups, reach_expand_dim=reach)
    chosen = default_expand_dim(map_dim, embedding_dim, unit)
    others = {1024, embedding_dim, 2 * embedding_dim, 4 * embedding_dim, 8 * map_dim, 32 * map_dim}
    if not any(_is_taken(map_dim, replace(unit, expand_dim=other)) for other in others):
        return
    assert make_plan(map_dim, replace(unit, expand_dim=chosen)).config.expand_dim == chosen


def _is_taken(map_dim: int, unit: UnitConfig) -> bool:
    try:
        make_plan(map_dim, unit)
    except UserError:
        return False
    return True
