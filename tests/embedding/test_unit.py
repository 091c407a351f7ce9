"""The unit against a naive reference, its reach, its start and its published sizes."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchdefine.config import to_plain
from torchdefine.embedding import VARIANTS, DefineUnit, UnitConfig
from torchdefine.errors import UserError


def build(variant: str, n=16, k=64, m=24, depth=4, max_groups=None, **changes) -> DefineUnit:
    m = k if not UnitConfig.of(variant, **changes).reduce else m
    sizes = {"embedding_dim": m, "expand_dim": k, "depth": depth, "max_groups": max_groups}
    return DefineUnit(n, UnitConfig.of(variant, **sizes, **changes))


def naive(unit: DefineUnit, vector: list[float]) -> list[float]:
    """One token, one group, one number at a time, from the paper's text and the state dict alone."""
    state = {name: value.tolist() for name, value in unit.state_dict().items()}
    config = unit.config
    hidden = list(vector)
    depth = unit.plan.depth
    for level in range(depth):
        last = level == depth - 1
        prefix = "last" if last else f"expansions.{level}.linear"
        gain = len(state[f"{prefix}.weight"][0]) ** -0.5 if config.weight_scaling else 1.0
        weight = [[[gain * value for value in row] for row in group] for group in state[f"{prefix}.weight"]]
        groups = len(weight)
        if level and config.skip in ("mix", "concat"):
            if config.skip == "mix":
                a, b = len(vector) // groups, len(hidden) // groups
                seen = [
                    value for g in range(groups) for value in vector[g * a : (g + 1) * a] + hidden[g * b : (g + 1) * b]
                ]
            else:
                seen = vector + hidden
        else:
            seen = hidden
        share = len(seen) // groups
        output = []
        for g in range(groups):
            chunk = seen[g * share : (g + 1) * share]
            for j in range(len(weight[g][0])):
                output.append(sum(chunk[i] * weight[g][i][j] for i in range(share)))
        if not last:
            if config.bias:
                output = [o + gain * b for o, b in zip(output, state[f"{prefix}.bias"], strict=True)]
            if config.shuffle:
                width = len(output) // groups
                output = [output[g * width + i] for i in range(width) for g in range(groups)]
            if config.norm != "none":
                output = normalised(output, groups if config.norm == "group" else 1, state, f"expansions.{level}.norm")
            output = [0.5 * o * (1 + math.erf(o / math.sqrt(2))) for o in output]
        if config.skip == "residual" and 0 < level < depth - 1:
            output = [o + h for o, h in zip(output, hidden, strict=True)]
        hidden = output
    return normalised(hidden, 1, state, "output_norm") if config.output_norm else hidden


def normalised(values: list[float], parts: int, state: dict, name: str) -> list[float]:
    width = len(values) // parts
    result = []
    for p in range(parts):
        part = values[p * width : (p + 1) * width]
        mean = sum(part) / width
        variance = sum((v - mean) ** 2 for v in part) / width
        result += [(v - mean) / math.sqrt(variance + 1e-5) for v in part]
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return [r * w + b for r, w, b in zip(result, weight, bias, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("norm", "bias", "n", "output_norm"),
    [
        ("none", True, 16, False),
        ("layer", True, 16, True),
        ("group", True, 16, False),
        ("none", False, 16, True),
        ("none", True, 32, False),
    ],
)
@pytest.mark.parametrize("weight_scaling", [False, True])
def test_equals_the_naive_reference(
    variant: str, norm: str, bias: bool, n: int, output_norm: bool, weight_scaling: bool
) -> None:
    options = {"norm": norm, "bias": bias, "output_norm": output_norm, "weight_scaling": weight_scaling}
    unit = build(variant, n=n, m=32, max_groups=4, **options).double()  # m, or n too, as wide as a residual layer
    assert any(name.endswith("linear.bias") for name in unit.state_dict()) == bias
    for parameter in unit.parameters():  # biases and norms that do something
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    x = torch.randn(2, 3, n, dtype=torch.float64)
    ours = unit(x)
    theirs = torch.tensor([naive(unit, token.tolist()) for token in x.flatten(0, 1)], dtype=torch.float64)
    torch.testing.assert_close(ours.flatten(0, 1), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", ["define", "glt-shuffle", "define-residual", "define-no-mixer"])
def test_gradients_are_those_of_finite_differences(variant: str) -> None:
    unit = build(variant, n=8, k=16, m=4, depth=3, max_groups=4).double()
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(unit, (x,))


@pytest.mark.parametrize("variant", ["define", "define-no-reduce", "define-residual"])
def test_an_output_norm_is_a_layer_norm_behind_the_last_layer(variant: str) -> None:
    unit = build(variant, max_groups=4, output_norm=True).double()
    for parameter in unit.output_norm.parameters():
        nn.init.normal_(parameter)
    without = build(variant, max_groups=4).double()
    without.load_state_dict({k: v for k, v in unit.state_dict().items() if "output_norm" not in k})
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        y = without(x)
        centred = y - y.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed * unit.output_norm.weight + unit.output_norm.bias

    ours, theirs = unit(x), by_hand(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(unit.layer_outputs(x)[-1], ours, rtol=0, atol=0)
    weights = torch.randn_like(ours)
    found = torch.autograd.grad((ours * weights).sum(), [x, *unit.parameters()])
    norm = list(unit.output_norm.parameters())
    expected = torch.autograd.grad((theirs * weights).sum(), [x, *without.parameters(), *norm])
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)
    unit.rescale_output(3.0)
    torch.testing.assert_close(unit(x), 3 * ours)
    unit.reset_parameters()
    assert float(unit(x).detach().square().mean()) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_equalised_unit_starts_as_the_same_function_and_moves_less(variant: str) -> None:
    """By the square of its gain in a step of plain SGD, by the gain in one of Adam."""
    moved = {}
    for weight_scaling in (False, True):
        torch.manual_seed(1)
        unit = build(variant, max_groups=4, weight_scaling=weight_scaling).double()
        x = torch.randn(64, 16, dtype=torch.float64)
        starts = unit(x).detach()
        weights = {}
        for name, optimizer in {"sgd": torch.optim.SGD, "adam": partial(torch.optim.Adam, eps=1e-30)}.items():
            one = copy.deepcopy(unit)
            one(x).square().mean().backward()
            optimizer(one.parameters(), lr=1e-2).step()
            weights[name] = one.last.used_weight() - unit.last.used_weight()
        moved[weight_scaling] = starts, weights
    torch.testing.assert_close(moved[True][0], moved[False][0], rtol=1e-4, atol=1e-5)  # they are drawn in float32
    gain = unit.last.weight.shape[1] ** -0.5
    torch.testing.assert_close(moved[True][1]["sgd"], gain**2 * moved[False][1]["sgd"], rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(moved[True][1]["adam"], gain * moved[False][1]["adam"], rtol=1e-2, atol=1e-6)


def reach(unit: DefineUnit) -> torch.Tensor:
    """Which outputs depend on which inputs: (m, n) of True and False."""
    x = torch.randn(8, unit.plan.map_dim, dtype=torch.float64)
    jacobian = torch.func.vmap(torch.func.jacrev(unit.double()))(x)  # (8, m, n)
    return (jacobian.abs() > 0).any(0)


@pytest.mark.parametrize(
    "variant", ["define", "hgt", "define-no-mixer", "define-no-reduce", "linear", "define-residual"]
)
@pytest.mark.parametrize("depth", [3, 5])
def test_every_output_sees_every_input(variant: str, depth: int) -> None:
    assert reach(build(variant, n=32, depth=depth)).all()


@pytest.mark.parametrize("skip", ["none", "mix"])
def test_stacked_groups_see_only_their_own_inputs(skip: str) -> None:
    seen = reach(build("glt", n=32, k=64, m=16, depth=4, max_groups=4, skip=skip))
    own_block = torch.block_diag(*torch.ones(4, 4, 8)).bool()
    assert torch.equal(seen, own_block)


def test_shuffle_lets_groups_see_everything() -> None:
    assert reach(build("glt-shuffle", n=32, k=64, m=16, depth=4, max_groups=4)).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("depth", "n"), [(3, 256), (7, 384), (11, 512)])
def test_signal_and_gradient_live_at_any_depth_without_norm(variant: str, depth: int, n: int) -> None:
    unit = build(variant, n=n, k=1024, m=n, depth=depth)
    x = torch.randn(1024, n, requires_grad=True)
    outputs = unit.layer_outputs(x)
    for output in outputs:
        assert 1 / 3 < output.std() < 3
    # A unit-variance gradient at m outputs is shared by n inputs, so for m = k it arrives sqrt(m / n) times as large.
    m = unit.plan.embedding_dim
    outputs[-1].backward(torch.randn_like(outputs[-1]) * (n / m) ** 0.5)
    assert 1 / 3 < x.grad.std() < 3


@given(
    log_groups=st.integers(0, 4),
    n_units=st.integers(2, 8),
    k_units=st.integers(8, 24),
    m_units=st.integers(1, 8),
    depth=st.integers(1, 11),
    variant=st.sampled_from(sorted(VARIANTS)),
    norm=st.sampled_from(["none", "layer", "group"]),
    activation=st.sampled_from(["gelu", "relu", "silu", "tanh", "none"]),
)
def test_any_valid_unit_is_finite_in_bfloat16(
    log_groups, n_units, k_units, m_units, depth, variant, norm, activation
) -> None:
    groups = 2**log_groups
    unit = build(
        variant, n=n_units * groups, k=k_units * 2 * groups, m=m_units * groups, depth=depth, max_groups=groups,
        norm=norm, activation=activation, **({"fixed_width": k_units * groups} if variant == "define-residual" else {}),
    )  # fmt: skip
    x = torch.randn(3, 2, unit.plan.map_dim)
    y = unit.bfloat16()(x.bfloat16())
    assert y.shape == (3, 2, unit.plan.embedding_dim)
    assert y.isfinite().all()


def size(depth, n, k, m, max_groups, variant="define", **changes) -> float:
    """Millions of parameters under the published convention: see docs/unit.md."""
    published = {"groups": "cycle", "reach_expand_dim": False, "rounding": "down", "norm": "layer", **changes}
    with torch.device("meta"):
        unit = build(variant, n=n, k=k, m=m, depth=depth, max_groups=max_groups, **published)
    return sum(p.numel() for p in unit.parameters()) / 1e6


@pytest.mark.parametrize(
    ("arguments", "millions"),
    [
        ((3, 256, 1024, 256, 16), 0.4123),
        ((7, 384, 1024, 384, 16), 1.8270),
        ((11, 512, 1024, 512, 16), 3.8899),
        ((3, 384, 4096, 384, 8), 1.9125),
        ((3, 128, 1024, 512, 8), 0.440384),
        # depth × width: the published totals less context and tables (32.6107, 38.6306, 44.7925)
        ((3, 256, 1024, 256, 8), 33.0229 - 32.6107),
        ((3, 256, 1536, 256, 8), 33.1548 - 32.6107),
        ((3, 256, 2048, 256, 8), 33.2866 - 32.6107),
        ((7, 384, 1024, 384, 8), 40.7297 - 38.6306),
        ((7, 384, 1536, 384, 8), 41.8626 - 38.6306),
        ((7, 384, 2048, 384, 8), 43.1893 - 38.6306),
        ((11, 512, 1024, 512, 8), 49.5462 - 44.7925),
        ((11, 512, 1536, 512, 8), 52.0185 - 44.7925),
        ((11, 512, 2048, 512, 8), 55.0248 - 44.7925),
    ],
)
def test_published_sizes(arguments: tuple, millions: float) -> None:
    assert size(*arguments) == pytest.approx(millions, abs=0.001)


@pytest.mark.parametrize(
    ("variant", "changes", "max_groups", "total"),
    [
        ("linear", {"groups": "dense", "skip": "mix"}, 1, 42.8543),
        ("glt", {"groups": "fixed", "skip": "mix", "multiple_of": 8}, 4, 39.6897),
        ("glt-shuffle", {"groups": "fixed", "skip": "mix", "multiple_of": 8}, 4, 39.6897),
        ("hgt", {"reach_expand_dim": True}, 4, 40.7302),
        ("define-no-mixer", {"groups": "halving"}, 32, 40.8886),
        ("define", {"groups": "halving"}, 32, 40.8886),
        ("define-residual", {"fixed_width": 1024}, 8, 41.6310),
    ],
)
def test_published_ablation_sizes(variant: str, changes: dict, max_groups: int, total: float) -> None:
    assert size(7, 384, 1024, 384, max_groups, variant, **changes) == pytest.approx(total - 38.6306, abs=0.001)


def test_published_size_without_reduce() -> None:
    wider_first_lstm_layer = 4 * (1024 - 384) * 1024 / 1e6
    unit = size(7, 384, 1024, 1024, 16, "define-no-reduce")
    assert unit + wider_first_lstm_layer == pytest.approx(43.9086 - 38.6306, abs=0.001)


@pytest.mark.parametrize("norm", ["none", "layer", "group"])
def test_reset_forgets_what_was_learnt(norm: str) -> None:
    unit = build("define", norm=norm)
    for parameter in unit.parameters():
        nn.init.constant_(parameter, 7.0)
    unit.reset_parameters()
    for name, parameter in unit.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
    assert 1 / 3 < unit(torch.randn(500, 16)).std() < 3


@pytest.mark.parametrize(
    ("variant", "groups", "skip", "reduces", "shuffles"),
    [
        ("define", [4, 2, 1], "mix", True, False),
        ("define-no-mixer", [4, 2, 1], "concat", True, False),
        ("define-residual", [4, 2, 1], "residual", True, False),
        ("define-no-reduce", [4, 2, 1], "mix", False, False),
        ("hgt", [4, 2, 1], "none", True, False),
        ("glt", [4, 4, 4], "none", True, False),
        ("glt-shuffle", [4, 4, 4], "none", True, True),
        ("linear", [1, 1, 1], "none", True, False),
    ],
)
def test_a_variant_is_the_papers_row(variant: str, groups: list[int], skip: str, reduces: bool, shuffles: bool) -> None:
    unit = build(variant, depth=3, max_groups=4)
    assert [layer.groups for layer in unit.plan] == groups
    assert unit.config.skip == skip
    assert (unit.plan.role(2) == "reduce") == reduces
    assert {layer.linear.shuffle for layer in unit.expansions} == {shuffles}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rescaled_input_gives_the_same(variant: str) -> None:
    unit = build(variant, m=32, max_groups=4, norm="layer").double()
    x = torch.randn(5, 16, dtype=torch.float64)
    before = unit(x)
    unit.rescale_input(50.0)
    torch.testing.assert_close(unit(x / 50), before)


def test_options_survive_a_round_trip() -> None:
    config = UnitConfig.of("glt-shuffle", norm="group", dropout=0.2, multiple_of=8)
    assert UnitConfig.read(to_plain(config), "unit") == config


def test_bad_options_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean 'define-residual'"):
        UnitConfig.of("define-residuals")
    with pytest.raises(UserError, match="did you mean 'activation'"):
        UnitConfig.of("define", activations="relu")
    with pytest.raises(UserError, match="norm is 'batch', but must be one of none, layer, group"):
        UnitConfig.of("define", norm="batch")
    with pytest.raises(UserError, match="activation is 'swish', but must be one of"):
        UnitConfig.of("define", activation="swish")
    with pytest.raises(UserError, match=r"dropout is 1\.5, but must be at least 0 and below 1"):
        UnitConfig(dropout=1.5)


def test_dropout_acts_in_training_only() -> None:
    unit = build("define", dropout=0.5)
    x = torch.randn(4, 16)
    assert not torch.equal(unit(x), unit(x))
    unit.eval()
    assert torch.equal(unit(x), unit(x))
