import pytest
import torch
from torch.nn import functional as F

from torchdefine import AdaptiveMap, StandardMap
from torchdefine.errors import UserError
from torchdefine.output import AdaptiveSoftmax, FullSoftmax, MixtureSoftmax, OutputLayer

V, WIDTH, HIDDEN, K = 40, 6, 9, 4


def full() -> OutputLayer:
    table = StandardMap(V, WIDTH)
    table.reset_parameters(0.7)
    return FullSoftmax(WIDTH, table)


def adaptive() -> OutputLayer:
    bands = AdaptiveMap(V, WIDTH, (10, 25), division=2)
    bands.reset_parameters(0.7)
    return AdaptiveSoftmax(WIDTH, bands)


COMPONENTS = {"full": full, "adaptive": adaptive}


def mixture(kind: str) -> MixtureSoftmax:
    layer = MixtureSoftmax(HIDDEN, COMPONENTS[kind](), K).double()
    layer.component._map[0].double()  # a tied table is not the layer's own
    return layer


@pytest.mark.parametrize("kind", COMPONENTS)
def test_probabilities_against_a_plain_sum_over_components(kind: str) -> None:
    layer = mixture(kind)
    hidden = torch.randn(3, 5, HIDDEN, dtype=torch.float64)
    prior = torch.softmax(hidden @ layer.prior.weight.T, -1)
    expected = torch.zeros(3, 5, V, dtype=torch.float64)
    for k in range(K):
        rows = slice(k * WIDTH, (k + 1) * WIDTH)
        latent = torch.tanh(hidden @ layer.latent.weight[rows].T + layer.latent.bias[rows])
        expected += prior[..., k : k + 1] * layer.component.log_prob(latent).exp()
    torch.testing.assert_close(layer.log_prob(hidden).exp(), expected)
    torch.testing.assert_close(expected.sum(-1), torch.ones(3, 5, dtype=torch.float64))


@pytest.mark.parametrize("kind", COMPONENTS)
def test_in_half_precision_probabilities_still_add_up_to_one(kind: str) -> None:
    layer = mixture(kind).bfloat16()
    layer.component._map[0].bfloat16()
    total = layer.log_prob(torch.randn(3, 5, HIDDEN).bfloat16()).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones(3, 5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", COMPONENTS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_loss_equals_cross_entropy_of_log_prob_with_gradients(
    kind: str, reduction: str, label_smoothing: float
) -> None:
    layer = mixture(kind)
    hidden = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (2, 5))
    targets[0, 2] = -1
    options = {"reduction": reduction, "ignore_index": -1}
    if label_smoothing:
        options["label_smoothing"] = label_smoothing
    theirs = F.cross_entropy(layer.log_prob(hidden).flatten(0, 1), targets.flatten(), **options)
    for hint in (None, layer.host_hint(targets.numpy(), ignore_index=-1)):
        ours = layer.loss(hidden, targets, hint=hint, **options)
        torch.testing.assert_close(ours.flatten(), theirs.flatten())
        wanted = [hidden, *layer.parameters()]
        for one, other in zip(
            torch.autograd.grad(ours.sum(), wanted, allow_unused=True),
            torch.autograd.grad(theirs.sum(), wanted, allow_unused=True, retain_graph=True),
            strict=True,
        ):
            if one is not None or other is not None:
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", COMPONENTS)
def test_a_mixture_of_one_is_its_component(kind: str) -> None:
    layer = MixtureSoftmax(HIDDEN, COMPONENTS[kind](), 1)
    hidden, targets = torch.randn(6, HIDDEN), torch.arange(0, 36, 6)
    latent = torch.tanh(layer.latent(hidden))
    torch.testing.assert_close(layer.log_prob(hidden), layer.component.log_prob(latent))
    torch.testing.assert_close(layer.loss(hidden, targets), layer.component.loss(latent, targets))


def test_its_log_probabilities_have_a_higher_rank_than_one_softmax() -> None:
    """What the mixture is for: a single softmax of width 6 and its normaliser give rank 8 at most."""
    hidden = torch.randn(60, HIDDEN, dtype=torch.float64)
    single = full().double()
    single._map[0].double()
    assert torch.linalg.matrix_rank(single.log_prob(hidden[:, :WIDTH]), rtol=1e-9) <= WIDTH + 2
    assert torch.linalg.matrix_rank(mixture("full").log_prob(hidden * 3), rtol=1e-9) > 2 * WIDTH


def test_latent_dropout_is_locked_and_for_training_only() -> None:
    layer = MixtureSoftmax(HIDDEN, full(), K, latent_dropout=0.5)
    hidden = torch.randn(2, 7, HIDDEN)
    zero = layer._latents(hidden).view(2, 7, K * WIDTH) == 0
    assert torch.equal(zero.all(1), zero.any(1))
    assert zero.any()
    by_row = (
        layer._latents(torch.randn(20, HIDDEN)).view(20, -1) == 0
    )  # without positions every vector has a mask of its own
    assert by_row.any(1).all()
    assert not by_row.all(1).any()
    assert by_row.shape == (20, K * WIDTH)
    layer.eval()
    assert not (layer._latents(hidden) == 0).any()


@pytest.mark.parametrize("kind", COMPONENTS)
def test_a_batch_of_nothing_has_no_loss(kind: str) -> None:
    layer, hidden = mixture(kind), torch.zeros(0, HIDDEN, dtype=torch.float64)
    assert layer.log_prob(hidden).shape == (0, V)
    assert layer.loss(hidden, torch.zeros(0, dtype=torch.long), reduction="sum") == 0


def test_bad_arguments() -> None:
    hidden = torch.zeros(1, HIDDEN, dtype=torch.float64)
    for smoothing in (0.0, 0.1):
        with pytest.raises(UserError, match=f"The id {V} is outside the vocabulary"):
            mixture("full").loss(hidden, torch.tensor([V]), label_smoothing=smoothing)
    with pytest.raises(UserError, match="components is 0"):
        MixtureSoftmax(HIDDEN, full(), 0)
    with pytest.raises(UserError, match="latent_dropout is 1"):
        MixtureSoftmax(HIDDEN, full(), 2, latent_dropout=1.0)


@pytest.mark.parametrize("kind", COMPONENTS)
def test_targets_of_32_bits_may_be_smoothed(kind: str) -> None:
    layer, targets = mixture(kind), torch.randint(V, (5,))
    hidden = torch.randn(5, HIDDEN, dtype=torch.float64)
    expected = layer.loss(hidden, targets, label_smoothing=0.1)
    torch.testing.assert_close(layer.loss(hidden, targets.int(), label_smoothing=0.1), expected)


@pytest.mark.parametrize("kind", COMPONENTS)
def test_follows_a_change_of_the_vocabulary(kind: str) -> None:
    layer = mixture(kind)
    layer.component._map[0].resize(V + 3)
    layer.resize(V + 3)
    assert layer.log_prob(torch.randn(2, HIDDEN, dtype=torch.float64)).shape == (2, V + 3)
