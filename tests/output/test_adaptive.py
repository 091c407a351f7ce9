import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.embedding import AdaptiveMap, StandardMap
from torchdefine.errors import UserError
from torchdefine.output import AdaptiveSoftmax
from torchdefine.output import layer as layer_file

V, WIDTH, CUTOFFS = 60, 16, (10, 30)
HIDDEN = 20  # differs from WIDTH where a projection is wanted


def tied(
    hidden_dim: int = WIDTH, ranked: bool = False, output_dim: int | None = None, projections: tuple[bool, ...] = ()
) -> nn.ModuleDict:
    map_layer = AdaptiveMap(V, WIDTH, CUTOFFS, counts=torch.randperm(V) if ranked else None, output_dim=output_dim)
    map_layer.reset_parameters(std=0.5)
    return nn.ModuleDict({"map": map_layer, "out": AdaptiveSoftmax(hidden_dim, map_layer, projections)}).double()


LAYERS: dict[str, Callable[[], nn.ModuleDict]] = {
    "tied": tied,
    "tied-projected": lambda: tied(HIDDEN),
    "ranked": lambda: tied(HIDDEN, ranked=True),
    "first-projection": lambda: tied(HIDDEN, output_dim=HIDDEN),
    "first-projection-tied": lambda: tied(18, output_dim=HIDDEN, projections=(True, True, True)),
    "own-projections": lambda: tied(projections=(False, True, False)),
    "untied": lambda: nn.ModuleDict({"out": AdaptiveSoftmax.untied(WIDTH, V, CUTOFFS)}).double(),
}


def batch(layer: AdaptiveSoftmax, *shape: int) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(*shape, layer.hidden_dim, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randint(0, V, shape)


def torchs_own(layer: AdaptiveSoftmax) -> nn.AdaptiveLogSoftmaxWithLoss:
    """The same layer by torch, with the weights copied."""
    theirs = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, V, list(CUTOFFS)).double()
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat((layer.map.bands[0].weight, layer.cluster_weight)))
        for tail, projection, band in zip(theirs.tail, layer.map.projections, layer.map.bands[1:], strict=True):
            tail[0].weight.copy_(projection)
            tail[1].weight.copy_(band.weight)
    return theirs


@pytest.mark.parametrize("hidden_dim", [WIDTH, HIDDEN])
@pytest.mark.parametrize("tokens", [1, 90])
def test_equals_torch(hidden_dim: int, tokens: int) -> None:
    layer = tied(hidden_dim)["out"]
    theirs = torchs_own(layer)
    hidden, targets = batch(layer, tokens)
    projected = hidden if layer.projection is None else hidden @ layer.projection.weight.T
    output, loss = theirs(projected, targets)
    ours = layer.loss(hidden, targets)
    torch.testing.assert_close(ours, loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.loss(hidden, targets, reduction="none"), -output, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.loss(hidden, targets, reduction="sum"), -output.sum(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.log_prob(hidden), theirs.log_prob(projected), rtol=1e-10, atol=1e-10)
    assert torch.equal(layer.predict(hidden), theirs.predict(projected))

    ours.backward(retain_graph=True)
    gradient = hidden.grad
    hidden.grad = None
    loss.backward()
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-10, atol=1e-10)
    head_gradient = torch.cat((layer.map.bands[0].weight.grad, layer.cluster_weight.grad))
    torch.testing.assert_close(head_gradient, theirs.head.weight.grad, rtol=1e-10, atol=1e-10)
    for tail, projection, band in zip(theirs.tail, layer.map.projections, layer.map.bands[1:], strict=True):
        for mine, reference in ((projection, tail[0].weight), (band.weight, tail[1].weight)):
            missing = torch.zeros_like(reference)  # torch gives an empty tail no gradient
            expected = missing if reference.grad is None else reference.grad
            torch.testing.assert_close(mine.grad, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_equals_cross_entropy_of_log_prob(
    kind: str, reduction: str, label_smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_file, "fitting_tokens", lambda num_embeddings: 4)
    model = LAYERS[kind]()
    hidden, targets = batch(model["out"], 3, 6)
    targets[1, 2:] = 7  # an ignored id may be one of the vocabulary
    options = {"ignore_index": 7, "reduction": reduction, "label_smoothing": label_smoothing}
    theirs = F.cross_entropy(model["out"].log_prob(hidden).transpose(1, 2), targets, **options)
    hint = model["out"].host_hint(targets.numpy(), ignore_index=7)
    assert len(hint) == 2
    assert 0 < sum(hint) < 14
    roomy = tuple(count + 5 for count in hint)
    inputs = [hidden, *model.parameters()]
    incoming = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, inputs, incoming, materialize_grads=True)  # not all projections are tied
    for given in (None, hint, roomy):
        ours = model["out"].loss(hidden, targets, hint=given, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        for mine, reference in zip(
            torch.autograd.grad(ours, inputs, incoming, materialize_grads=True), expected, strict=True
        ):
            torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_no_token_counts(label_smoothing: float) -> None:
    model = tied()
    hidden, targets = batch(model["out"], 5)
    options = {"ignore_index": -100, "label_smoothing": label_smoothing}
    loss = model["out"].loss(hidden, torch.full_like(targets, -100), **options)
    assert loss.isnan()
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert model["out"].loss(hidden[:0], targets[:0], reduction="sum", **options) == 0


@pytest.mark.parametrize("kind", LAYERS)
def test_log_prob_predict_and_top_k_agree(kind: str) -> None:
    layer = LAYERS[kind]()["out"]
    hidden, _ = batch(layer, 8, 25)
    log_probs = layer(hidden)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(8, 25, dtype=torch.float64))
    best = layer.predict(hidden)
    assert torch.equal(best, log_probs.argmax(-1))
    ranks = best if layer.map.ranks is None else layer.map.ranks[best]
    assert 0 < (ranks < CUTOFFS[0]).sum() < 200  # both ways to an answer were taken
    values, ids = layer.top_k(hidden, 5)
    torch.testing.assert_close(values, log_probs.topk(5).values)
    assert torch.equal(ids, log_probs.topk(5).indices)
    assert layer.predict(hidden[0, 0]).shape == ()
    assert layer.predict(hidden[:, :0]).shape == (8, 0)


def test_predict_leaves_the_tails_alone_where_a_frequent_token_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tied()["out"]
    hidden = layer.map.bands[0].weight.detach() * 20
    with torch.no_grad():
        layer.cluster_weight.zero_()
    seen = []
    log_prob = layer.log_prob
    monkeypatch.setattr(layer, "log_prob", lambda rows: seen.append(len(rows)) or log_prob(rows))
    assert torch.equal(layer.predict(hidden), torch.arange(CUTOFFS[0]))
    assert sum(seen) == 0


def test_ranks_only_rename_the_tokens() -> None:
    ranked = tied(ranked=True)["out"]
    plain = tied()["out"]
    state = {name: value for name, value in ranked.map.state_dict().items() if name != "ranks"}
    plain.map.load_state_dict(state)
    plain.load_state_dict(ranked.state_dict())
    hidden, ids = batch(ranked, 50)
    ranks = ranked.map.ranks[ids]
    torch.testing.assert_close(ranked.loss(hidden, ids), plain.loss(hidden, ranks))
    torch.testing.assert_close(ranked.log_prob(hidden)[:, torch.arange(V)], plain.log_prob(hidden)[:, ranked.map.ranks])
    assert torch.equal(ranked.map.ranks[ranked.predict(hidden)], plain.predict(hidden))
    assert ranked.host_hint(ids.numpy()) == plain.host_hint(ranks.numpy())


def test_host_hint_counts_and_follows_the_ranks() -> None:
    model = tied(ranked=True)
    ids = np.arange(V, dtype=np.uint16).reshape(6, 10)
    assert model["out"].host_hint(ids) == (20, 30)
    targets = np.array([3, 3, -100])
    for ranks in (torch.arange(V), torch.arange(V).flip(0)):
        model["map"].load_state_dict({**model["map"].state_dict(), "ranks": ranks})
        hint = model["out"].host_hint(targets)
        assert hint == ((0, 0) if ranks[3] == 3 else (0, 2))
    for size in (V + 5, V + 9):
        model["map"].resize(size)
        assert model["out"].host_hint(np.array([size - 1])) == (0, 1)


@pytest.mark.parametrize("kind", ["tied", "tied-projected", "untied"])
def test_every_parameter_gets_a_gradient_though_tails_are_empty(kind: str) -> None:
    model = LAYERS[kind]()
    hidden, targets = batch(model["out"], 12)
    if kind == "tied":
        hidden = model["map"](targets % CUTOFFS[0])
    model["out"].loss(hidden, targets % CUTOFFS[0]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model["out"].map.bands[1].weight.grad.any()


def test_tied_tables_are_saved_once_and_stay_tied() -> None:
    model = copy.deepcopy(tied(HIDDEN)).float().double()
    assert set(model["out"].state_dict()) == {"projection.weight", "cluster_weight"}
    assert sum(parameter.numel() for parameter in model.parameters()) == (
        sum(p.numel() for p in model["map"].parameters()) + 2 * WIDTH + HIDDEN * WIDTH
    )
    hidden, _ = batch(model["out"], 4)
    for tensor in model["map"].parameters():
        before = model["out"](hidden)
        with torch.no_grad():
            tensor += 0.1
        assert not torch.equal(model["out"](hidden), before)
    untied = LAYERS["untied"]()
    again = LAYERS["untied"]()
    again.load_state_dict(untied.state_dict())
    hidden, _ = batch(untied["out"], 4)
    assert torch.equal(again["out"](hidden), untied["out"](hidden))
    assert copy.deepcopy(untied)["out"].own_map is not untied["out"].own_map


def test_tables_learn_from_both_of_their_uses() -> None:
    model = tied()
    ids, targets = torch.randint(0, V, (30,)), torch.randint(0, V, (30,))
    model["out"].loss(model["map"](ids).tanh(), targets).backward()
    entering, leaving = copy.deepcopy(model["map"]), copy.deepcopy(model["map"])
    out = AdaptiveSoftmax(WIDTH, leaving).double()
    out.load_state_dict(model["out"].state_dict())
    F.nll_loss(out.log_prob(entering(ids).tanh()), targets).backward()
    for both, first, second in zip(model["map"].parameters(), entering.parameters(), leaving.parameters(), strict=True):
        torch.testing.assert_close(both.grad, first.grad + second.grad, rtol=1e-10, atol=1e-10)


def test_a_resized_map_is_seen() -> None:
    model = tied()
    model["map"].resize(V + 3)
    hidden, _ = batch(model["out"], 4)
    assert model["out"].log_prob(hidden).shape == (4, V + 3)
    model["out"].loss(hidden, torch.tensor([V + 2, V, 0, 15])).backward()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_targets_may_be_of_any_whole_number_type(dtype: torch.dtype) -> None:
    layer = AdaptiveSoftmax.untied(WIDTH, 600, (10, 30)).double()
    targets = torch.arange(256 if dtype == torch.uint8 else 600)
    hidden = torch.randn(len(targets), WIDTH, dtype=torch.float64)
    for hint, ignored in ((None, 3), ((30, 590), 3), (None, -100)):
        expected = layer.loss(hidden, targets, ignore_index=ignored, hint=hint)
        assert layer.loss(hidden, targets.to(dtype), ignore_index=ignored, hint=hint) == expected


def test_autocast_gives_float32() -> None:
    layer = tied(HIDDEN).float()["out"]
    hidden, targets = torch.randn(50, HIDDEN), torch.randint(0, V, (50,))
    exact = layer.loss(hidden, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, log_probs = layer.loss(hidden, targets), layer.log_prob(hidden)
    assert loss.dtype == log_probs.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=1e-2)
    loss.backward()


def test_bad_arguments_are_refused() -> None:
    layer = tied()["out"]
    hidden, targets = batch(layer, 4)
    cases: dict[str, Callable[[], object]] = {
        "has 2 values for 3 bands": lambda: AdaptiveSoftmax(WIDTH, layer.map, (False, True)),
        "first band has no projection": lambda: AdaptiveSoftmax(WIDTH, layer.map, (True, True, True)),
        "not to StandardMap": lambda: AdaptiveSoftmax(8, StandardMap(V, 8)),  # type: ignore[arg-type]
        "hidden_dim is 0": lambda: AdaptiveSoftmax(0, layer.map),
        "The cutoff 90 does not fit": lambda: AdaptiveSoftmax.untied(WIDTH, V, (90,)),
        "does not cover targets in 3 bands": lambda: layer.loss(hidden, targets, hint=(0, 0)),
        "pass host_hint of the same targets": lambda: layer.loss(hidden, targets, hint=(4, 4, 4)),
        "'max' is unknown": lambda: layer.loss(hidden, targets, reduction="max"),
        "label_smoothing is -1": lambda: layer.loss(hidden, targets, label_smoothing=-1),
        "The id 60 is outside": lambda: layer.loss(hidden, targets + V - targets),
        "The id 61 is outside": lambda: layer.host_hint(np.array([61])),
        "targets have the shape": lambda: layer.loss(hidden, targets[:3]),
    }
    for message, call in cases.items():
        with pytest.raises(UserError, match=message):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_with_a_hint_nobody_waits_for_the_gpu(reduction: str) -> None:
    model = tied(HIDDEN, ranked=True).float().cuda()
    targets = torch.randint(0, V, (300,))
    targets[::7] = -100
    hint = model["out"].host_hint(targets.numpy())
    hidden, on_device = torch.randn(300, HIDDEN, device="cuda", requires_grad=True), targets.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = model["out"].loss(hidden, on_device, reduction=reduction, hint=hint)
        loss.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    theirs = F.cross_entropy(model["out"].log_prob(hidden), on_device, reduction=reduction)
    torch.testing.assert_close(loss, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_targets_of_32_bits_may_be_smoothed(name: str) -> None:
    layer = LAYERS[name]()["out"]
    hidden, targets = batch(layer, 7)
    expected = layer.loss(hidden, targets, label_smoothing=0.1)
    torch.testing.assert_close(layer.loss(hidden, targets.int(), label_smoothing=0.1), expected)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_nothing_at_all_fits_into_any_room(reduction: str) -> None:
    layer = LAYERS["tied"]()["out"]
    hidden, targets = batch(layer, 0)
    assert layer.loss(hidden, targets, reduction=reduction, hint=(3, 2)).sum() == 0


def test_an_untied_layer_grows_by_itself() -> None:
    layer = LAYERS["untied"]()["out"]
    before = layer.map.bands[-1].weight.detach().clone()
    layer.resize(V + 5)
    assert layer.log_prob(torch.randn(2, WIDTH, dtype=torch.float64)).shape == (2, V + 5)
    assert torch.equal(layer.map.bands[-1].weight[: len(before)], before)
