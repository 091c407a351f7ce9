"""Bands of one table, against probabilities worked out token by token in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.embedding import AdaptiveMap, ProjectiveMap, StandardMap
from torchdefine.errors import UserError
from torchdefine.output import AdaptiveTableSoftmax

V, WIDTH, HIDDEN, CUTOFFS = 60, 16, 20, (10, 30)


COUNTS = torch.randperm(V, generator=torch.Generator().manual_seed(3)) + 1
BY_FREQUENCY = torch.argsort(COUNTS, descending=True).tolist()


def make(kind: str) -> nn.ModuleDict:
    ties = {"none tied": (False,) * 3, "one tied": (False, False, True), "all tied": (True,) * 3}
    if kind in ties:
        map_layer: StandardMap | ProjectiveMap = ProjectiveMap(V, WIDTH, HIDDEN)
        map_layer.reset_parameters(0.5)
        layer = AdaptiveTableSoftmax(HIDDEN, map_layer, CUTOFFS, ties[kind])
    else:
        map_layer = StandardMap(V, WIDTH)
        map_layer.reset_parameters(0.5)
        counts = COUNTS if kind == "standard, by counts" else None
        layer = AdaptiveTableSoftmax(HIDDEN if "projected" in kind else WIDTH, map_layer, CUTOFFS, counts=counts)
    with torch.no_grad():
        layer.bias.normal_()
        layer.cluster_bias.normal_()
    return nn.ModuleDict({"map": map_layer, "out": layer}).double()


KINDS = ["standard", "standard, by counts", "standard, projected", "none tied", "one tied", "all tied"]


def naive_log_prob(model: nn.ModuleDict, vector: Tensor, token: int) -> Tensor:
    """log p(token) after one hidden vector: the head, and the band if there is one."""
    layer, table, bias = model["out"], model["map"].table.weight, model["out"].bias
    if layer.ranks is not None:
        table, bias, token = table[BY_FREQUENCY], bias[BY_FREQUENCY], BY_FREQUENCY.index(token)

    def projected(band: int) -> Tensor:
        if layer.hidden_dim == WIDTH:
            return vector
        if str(band) in layer.projections:
            return layer.projections[str(band)].weight @ vector
        return vector @ model["map"].projection.weight

    head = [table[t] @ projected(0) + bias[t] for t in range(CUTOFFS[0])]
    head += [w @ projected(0) + b for w, b in zip(layer.cluster_weight, layer.cluster_bias, strict=True)]
    log_head = torch.stack(head).log_softmax(0)
    if token < CUTOFFS[0]:
        return log_head[token]
    band, start, stop = (1, 10, 30) if token < CUTOFFS[1] else (2, 30, V)
    within = torch.stack([table[t] @ projected(band) + bias[t] for t in range(start, stop)])
    return log_head[CUTOFFS[0] + band - 1] + within.log_softmax(0)[token - start]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hinted", [False, True])
def test_equals_the_naive_probabilities_with_gradients(kind: str, hinted: bool) -> None:
    model = make(kind)
    layer = model["out"]
    hidden = torch.randn(2, 9, layer.hidden_dim, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (2, 9))
    targets[0, 3] = -100
    hint = layer.host_hint(targets.numpy()) if hinted else None
    ours = layer.loss(hidden, targets, reduction="none", hint=hint)
    expected = torch.stack(
        [
            -naive_log_prob(model, vector, int(token)) if token >= 0 else torch.zeros((), dtype=torch.float64)
            for vector, token in zip(hidden.flatten(0, 1), targets.flatten(), strict=True)
        ]
    ).view(2, 9)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(layer.loss(hidden, targets, hint=hint), expected.sum() / 17)
    inputs = [hidden, model["map"].table.weight, *layer.parameters()]
    if kind in ("one tied", "all tied"):
        inputs.append(model["map"].projection.weight)
    for one, other in zip(
        torch.autograd.grad(layer.loss(hidden, targets, reduction="sum", hint=hint), inputs),
        torch.autograd.grad(expected.sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_loss_and_predictions_agree(kind: str) -> None:
    layer = make(kind)["out"]
    hidden, targets = torch.randn(80, layer.hidden_dim, dtype=torch.float64), torch.randint(0, V, (80,))
    log_probs = layer.log_prob(hidden)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(80, dtype=torch.float64))
    torch.testing.assert_close(layer.loss(hidden, targets), F.cross_entropy(log_probs, targets))
    smoothed = F.cross_entropy(log_probs, targets, label_smoothing=0.2)
    torch.testing.assert_close(layer.loss(hidden, targets, label_smoothing=0.2), smoothed)
    assert torch.equal(layer.predict(hidden), log_probs.argmax(-1))
    edges = np.array([0, 9, 10, 29, 30, 59])
    ids = edges if layer.ranks is None else np.array(BY_FREQUENCY)[edges]
    assert layer.host_hint(np.append(ids, -100)) == (2, 2)


def test_own_parameters_are_what_the_ties_leave() -> None:
    own = {kind: sum(p.numel() for p in make(kind)["out"].parameters()) for kind in KINDS}
    plain = V + len(CUTOFFS) * (WIDTH + 1)
    assert own["standard"] == own["standard, by counts"] == own["all tied"] == plain
    assert own["one tied"] == plain + 2 * WIDTH * HIDDEN
    assert own["none tied"] == own["standard, projected"] == plain + 3 * WIDTH * HIDDEN


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient_though_tails_are_empty(kind: str) -> None:
    model = make(kind)
    hidden = torch.randn(12, model["out"].hidden_dim, dtype=torch.float64)
    model["out"].loss(hidden, torch.randint(0, CUTOFFS[0], (12,))).backward()
    assert all(parameter.grad is not None for parameter in model["out"].parameters())


def test_a_resized_map_wants_a_resized_layer() -> None:
    model = make("one tied")
    before = model["out"].bias.detach().clone()
    model["map"].resize(V + 5)
    with pytest.raises(UserError, match=r"call resize\(65\) here too"):
        model["out"].log_prob(torch.randn(2, HIDDEN, dtype=torch.float64))
    model["out"].resize(V + 5)
    assert model["out"].log_prob(torch.randn(2, HIDDEN, dtype=torch.float64)).shape == (2, V + 5)
    assert torch.equal(model["out"].bias[:V], before)
    assert not model["out"].bias[V:].any()


def test_ranks_are_saved() -> None:
    hidden = torch.randn(5, WIDTH, dtype=torch.float64)
    ranked, unaware = make("standard, by counts"), make("standard, by counts")
    unaware["out"].frequency_ranks = torch.arange(V)
    expected = ranked["out"].log_prob(hidden)
    unaware.load_state_dict(ranked.state_dict())
    assert torch.equal(unaware["out"].log_prob(hidden), expected)


def test_a_ranked_layer_grows_at_its_rarest_band_and_does_not_shrink() -> None:
    model, hidden = make("standard, by counts"), torch.randn(4, WIDTH, dtype=torch.float64)
    head_before = model["out"].log_prob(hidden)[:, BY_FREQUENCY[: CUTOFFS[0]]]
    model["map"].resize(V + 5)
    model["out"].resize(V + 5)
    after = model["out"].log_prob(hidden)
    torch.testing.assert_close(after[:, BY_FREQUENCY[: CUTOFFS[0]]], head_before)
    torch.testing.assert_close(after.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    with pytest.raises(UserError, match=f"Rows cannot be removed.*keep at least {V + 5}"):
        model["out"].resize(V)


def test_bad_arguments_are_refused() -> None:
    table, projective = StandardMap(V, WIDTH), ProjectiveMap(V, WIDTH, HIDDEN)
    cases: dict[str, Callable[[], object]] = {
        "not AdaptiveMap": lambda: AdaptiveTableSoftmax(HIDDEN, AdaptiveMap(V, WIDTH, CUTOFFS), CUTOFFS),  # type: ignore[arg-type]
        "cutoff 60 does not fit": lambda: AdaptiveTableSoftmax(WIDTH, table, (10, 60)),
        "2 values for 3 bands": lambda: AdaptiveTableSoftmax(HIDDEN, projective, CUTOFFS, (True, False)),
        "no projection to tie to": lambda: AdaptiveTableSoftmax(WIDTH, table, CUTOFFS, (True, False, False)),
        "counts has the shape": lambda: AdaptiveTableSoftmax(WIDTH, table, CUTOFFS, counts=[1, 2]),
        "gives 20 values": lambda: AdaptiveTableSoftmax(24, projective, CUTOFFS, (True, False, False)),
    }
    for message, call in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
