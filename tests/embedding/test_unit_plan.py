import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdefine.embedding.unit_plan import Plan, UnitConfig, make_plan
from torchdefine.errors import UserError

PUBLISHED = {"groups": "cycle", "reach_expand_dim": False, "rounding": "down"}


def planned(
    map_dim: int, expand_dim: int, embedding_dim: int, depth: int, max_groups: int | None = None, **rules
) -> Plan:
    sizes = {"embedding_dim": embedding_dim, "expand_dim": expand_dim, "depth": depth, "max_groups": max_groups}
    return make_plan(map_dim, UnitConfig(**sizes, **rules))


def groups_of(depth: int, max_groups: int | None, scheme: str) -> list[int]:
    return [layer.groups for layer in planned(256, 1024, 256, depth, max_groups, groups=scheme)]


def widths_of(depth: int, max_groups: int = 16, map_dim: int = 384, **rules) -> list[int]:
    return [layer.output_width for layer in planned(map_dim, 1024, map_dim, depth, max_groups, **rules)]


@pytest.mark.parametrize(
    ("depth", "max_groups", "scheme", "expected"),
    [
        (3, None, "halving", [4, 2, 1]),
        (5, None, "halving", [16, 8, 4, 2, 1]),
        (7, None, "halving", [16, 8, 4, 2, 1, 1, 1]),
        (7, 32, "halving", [32, 16, 8, 4, 2, 1, 1]),
        (1, None, "halving", [1]),
        (7, 4, "cycle", [1, 4, 2, 1, 4, 2, 1]),
        (7, 8, "cycle", [4, 2, 1, 8, 4, 2, 1]),
        (11, 16, "cycle", [1, 16, 8, 4, 2, 1, 16, 8, 4, 2, 1]),
        (4, 4, "fixed", [4, 4, 4, 4]),
        (4, 8, "dense", [1, 1, 1, 1]),
    ],
)
def test_groups(depth: int, max_groups: int | None, scheme: str, expected: list[int]) -> None:
    assert groups_of(depth, max_groups, scheme) == expected


def test_widths_reach_k_by_default_and_stop_short_as_published() -> None:
    assert widths_of(3) == [704, 1024, 384]
    assert widths_of(7, **PUBLISHED) == [384, 480, 592, 704, 800, 912, 384]
    assert widths_of(3, map_dim=256, **PUBLISHED) == [256, 640, 256]


def test_rounding_follows_the_rule_not_floating_point() -> None:
    # 384 + 640 * 2 / 6 = 597.33…: down to a multiple of 8 is 592, nearest is 600
    rules = {"groups": "cycle", "reach_expand_dim": False}
    assert widths_of(7, 8, **rules, rounding="down")[2] == 592
    assert widths_of(7, 8, **rules, rounding="nearest")[2] == 600
    assert widths_of(7, 8, **rules, rounding="down", multiple_of=64)[2] == 576


def test_without_reduce_the_last_layer_is_k_wide() -> None:
    plan = planned(384, 1024, 1024, 7, 16, **PUBLISHED, reduce=False)
    assert [layer.output_width for layer in plan] == [384, 480, 592, 704, 800, 912, 1024]
    own = planned(384, 1024, 1024, 2, 2, reduce=False)
    assert [layer.output_width for layer in own] == [704, 1024]
    assert own.role(1) == "expand"


def test_fixed_width_is_half_of_k_for_residuals_unless_given() -> None:
    assert widths_of(4, 8, skip="residual") == [512, 512, 512, 384]
    assert widths_of(4, 8, skip="residual", fixed_width=1024) == [1024, 1024, 1024, 384]


def test_printed_plan_names_every_layer() -> None:
    lines = str(planned(128, 1024, 384, 3)).splitlines()
    assert len(lines) == 4
    assert lines[-1].split() == ["3", "reduce", "1,152", "128", "384", "1", "442,368"]


@given(
    units=st.integers(1, 12),
    growth=st.integers(0, 60),
    out=st.integers(1, 20),
    depth=st.integers(1, 12),
    log_groups=st.integers(0, 4),
    scheme=st.sampled_from(["halving", "cycle", "fixed", "dense"]),
    skip=st.sampled_from(["mix", "concat", "residual", "none"]),
    reach=st.booleans(),
    rounding=st.sampled_from(["nearest", "down"]),
)
def test_invariants(units, growth, out, depth, log_groups, scheme, skip, reach, rounding) -> None:
    groups = 2**log_groups
    n, k, m = units * groups, (units + growth) * 2 * groups, out * groups
    plan = planned(n, k, m, depth, groups, groups=scheme, skip=skip, reach_expand_dim=reach, rounding=rounding)
    assert plan.depth == depth
    assert plan.layers[0].input_width == n
    assert plan.layers[-1].output_width == m
    again = n if skip in ("mix", "concat") else 0
    for before, layer in zip(plan.layers, plan.layers[1:], strict=False):
        assert layer.input_width == before.output_width + again
    for layer in plan:
        assert layer.input_width % layer.groups == 0
        assert layer.output_width % layer.groups == 0
        assert 1 <= layer.groups <= groups
    if skip != "residual" and depth > 1:
        expansion = [layer.output_width for layer in plan.layers[:-1]]
        assert expansion == sorted(expansion)
        assert expansion[0] >= n - groups
        assert expansion[-1] == k if reach else expansion[-1] <= k


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((100, 1024, 384, 5, 16), ["map_dim 100", "16 groups", "96 or 112"]),
        ((128, 1024, 384, 0, None), ["depth is 0", "at least 1"]),
        ((256, 128, 384, 3, None), ["expand_dim 128", "map_dim 256", "use 256 or more"]),
        ((128, 1022, 384, 3, 16), ["expand_dim 1022", "8 groups", "1016 or 1024"]),
        ((128, 1024, 384, 3, 0), ["max_groups is 0"]),
        ((-4, 1024, 384, 3, None), ["map_dim is -4"]),
        ((4, 1024, 384, 5, 16), ["map_dim 4", "16 groups", "use 16,"]),
    ],
)
def test_bad_sizes_are_refused_in_one_helpful_sentence(sizes: tuple, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        planned(*sizes)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_reduce_groups_must_divide_embedding_dim() -> None:
    with pytest.raises(
        UserError, match=r"embedding_dim 385 is not divisible by the 4 groups of layer 3: use 384 or 388"
    ):
        planned(128, 1024, 385, 3, 4, groups="fixed")


def test_only_what_enters_a_layer_must_suit_its_groups() -> None:
    def cycle(skip: str, expand_dim: int = 64) -> list[int]:
        return [layer.groups for layer in planned(6, expand_dim, 24, 4, 4, groups="cycle", skip=skip)]

    assert cycle("none") == [1, 4, 2, 1], "map_dim enters the first layer alone"
    with pytest.raises(UserError, match="map_dim 6 is not divisible by the 4 groups of layer 2"):
        cycle("mix")
    with pytest.raises(UserError, match="the input 30 is not divisible by the 4 groups of layer 2"):
        cycle("concat")
    with pytest.raises(UserError, match="expand_dim 63 is not divisible by the 2 groups of layer 3"):
        cycle("none", expand_dim=63)


def test_bad_rules_are_refused() -> None:
    with pytest.raises(UserError, match="groups is 'halves', but must be one of halving, cycle"):
        UnitConfig(groups="halves")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"must be a power of two.*use 8 or 16"):
        planned(120, 960, 240, 3, 12, groups="cycle")
    with pytest.raises(UserError, match="use embedding_dim=1024"):
        planned(128, 1024, 384, 3, reduce=False)
    with pytest.raises(TypeError, match="map_dim must be a whole number"):
        make_plan(128.0)  # type: ignore[arg-type]
