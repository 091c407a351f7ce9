import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.embedding import AdaptiveMap, DeFINE, ProjectiveMap, StandardMap
from torchdefine.errors import UserError
from torchdefine.output import FullSoftmax

V = 23
LAYERS: dict[str, Callable[[], nn.ModuleDict]] = {
    "tied": lambda: tied(StandardMap(V, 8), 8),
    "tied-projected": lambda: tied(ProjectiveMap(V, 8, 16), 12),
    "untied": lambda: nn.ModuleDict({"out": FullSoftmax(12, num_embeddings=V)}),
    "untied-no-bias": lambda: nn.ModuleDict({"out": FullSoftmax(12, num_embeddings=V, bias=False)}),
}


def tied(map_layer: StandardMap | ProjectiveMap, hidden_dim: int) -> nn.ModuleDict:
    return nn.ModuleDict({"map": map_layer, "out": FullSoftmax(hidden_dim, map_layer)})


def with_random_bias(model: nn.ModuleDict) -> FullSoftmax:
    layer = model["out"]
    assert isinstance(layer, FullSoftmax)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer


def plain_logits(layer: FullSoftmax, hidden: Tensor) -> Tensor:
    if layer.projection is not None:
        hidden = hidden @ layer.projection.weight.T
    logits = hidden @ layer.weight.T
    return logits if layer.bias is None else logits + layer.bias


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_equals_torch(kind: str, reduction: str) -> None:
    model = LAYERS[kind]().double()
    layer = with_random_bias(model)
    hidden = torch.randn(3, 5, layer.hidden_dim, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (3, 5))
    targets[1, 2:] = -1
    ours = layer.loss(hidden, targets, ignore_index=-1, reduction=reduction, label_smoothing=0.1)
    logits = plain_logits(layer, hidden).transpose(1, 2)
    theirs = F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    inputs = [hidden, layer.weight, *layer.parameters()]
    for mine, reference in zip(
        torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", LAYERS)
def test_log_prob_predict_and_top_k_agree(kind: str) -> None:
    layer = with_random_bias(LAYERS[kind]())
    hidden = torch.randn(2, 7, layer.hidden_dim)
    log_probs = layer(hidden)
    assert log_probs.shape == (2, 7, V)
    torch.testing.assert_close(log_probs, F.log_softmax(plain_logits(layer, hidden), -1))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 7))
    assert torch.equal(layer.predict(hidden), log_probs.argmax(-1))
    for k in (1, 4, V):
        values, ids = layer.top_k(hidden, k)
        torch.testing.assert_close(values, log_probs.topk(k).values)
        assert torch.equal(ids, log_probs.topk(k).indices)
    assert layer.predict(hidden[0, 0]).shape == ()
    assert layer.predict(hidden[:, :0]).shape == (2, 0)
    assert layer.host_hint(np.zeros(3, dtype=np.int64)) is None


def test_autocast_and_low_precision_still_give_float32() -> None:
    layer = with_random_bias(LAYERS["tied-projected"]())
    hidden, targets = torch.randn(40, 12), torch.randint(0, V, (40,))
    exact = layer.loss(hidden, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = {"autocast": layer.loss(hidden, targets), "log_prob": F.nll_loss(layer.log_prob(hidden), targets)}
    for name, loss in losses.items():
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, exact, rtol=1e-2, atol=1e-2, msg=name)


def test_a_tied_table_is_saved_once_and_loads_again() -> None:
    model = LAYERS["tied-projected"]()
    assert set(model.state_dict()) == {"map.table.weight", "map.projection.weight", "out.projection.weight", "out.bias"}
    assert set(model["out"].state_dict()) == {"projection.weight", "bias"}
    other = LAYERS["tied-projected"]()
    other.load_state_dict(model.state_dict())
    hidden = torch.randn(4, 12)
    assert torch.equal(other["out"](hidden), model["out"](hidden))
    assert "out.own_map.table.weight" in LAYERS["untied"]().state_dict()


def test_the_tie_survives_copies_and_conversion() -> None:
    model = copy.deepcopy(LAYERS["tied"]()).to(torch.float64)
    hidden = torch.randn(4, 8, dtype=torch.float64)
    before = model["out"](hidden)
    with torch.no_grad():
        model["map"].table.weight[3] += 1
    assert not torch.equal(model["out"](hidden), before)
    assert model["out"].weight is model["map"].table.weight
    assert len(list(model.parameters())) == 2


def test_the_table_learns_from_both_of_its_uses() -> None:
    model = LAYERS["tied"]().double()
    ids, targets = torch.randint(0, V, (6,)), torch.randint(0, V, (6,))
    model["out"].loss(model["map"](ids).tanh(), targets).backward()
    entering, leaving = (model["map"].table.weight.detach().clone().requires_grad_() for _ in range(2))
    F.cross_entropy(entering[ids].tanh() @ leaving.T, targets).backward()
    assert entering.grad is not None
    assert leaving.grad is not None
    torch.testing.assert_close(model["map"].table.weight.grad, entering.grad + leaving.grad)


def test_ties_to_the_map_inside_an_embedding() -> None:
    embedding = DeFINE(V, 16, map_dim=8, expand_dim=32, depth=2, max_groups=2)
    layer = FullSoftmax(16, embedding.map)  # type: ignore[arg-type]
    assert layer.weight.shape == (V, 8)
    assert layer.projection is not None
    assert layer.log_prob(embedding(torch.arange(5))).shape == (5, V)


def test_resize_follows_the_map() -> None:
    model = LAYERS["tied"]()
    layer = with_random_bias(model)
    hidden = torch.randn(4, 8)
    before = layer.log_prob(hidden)
    model["map"].resize(V + 2)
    with pytest.raises(UserError, match=f"{V} biases, but its table {V + 2} rows: call resize\\({V + 2}\\)"):
        layer.log_prob(hidden)
    layer.resize(V + 2)
    assert layer.num_embeddings == V + 2
    assert layer.bias is not None
    assert not layer.bias[V:].any()
    torch.testing.assert_close(layer.log_prob(hidden)[:, :V].log_softmax(-1), before)
    layer.loss(hidden, torch.tensor([V, V + 1, 0, 1])).backward()


def test_resize_of_an_own_table() -> None:
    layer = with_random_bias(LAYERS["untied"]())
    hidden = torch.randn(4, 12)
    before = layer.log_prob(hidden)
    layer.resize(V + 2)
    torch.testing.assert_close(layer.log_prob(hidden)[:, :V].log_softmax(-1), before)
    layer.requires_grad_(False).resize(10)
    torch.testing.assert_close(layer.log_prob(hidden), before[:, :10].log_softmax(-1))
    assert not any(parameter.requires_grad for parameter in layer.parameters()), "what is frozen stays so"


def test_without_bias_there_is_none() -> None:
    layer = LAYERS["untied-no-bias"]()["out"]
    assert set(layer.state_dict()) == {"own_map.table.weight"}
    layer.resize(V + 2)
    hidden = torch.randn(4, 12)
    assert layer.log_prob(hidden).shape == (4, V + 2)
    assert layer.bfloat16().log_prob(hidden.bfloat16()).dtype == torch.float32


def test_bad_arguments_are_refused() -> None:
    layer = FullSoftmax(12, num_embeddings=V)
    hidden, ids = torch.randn(2, 12), torch.zeros(2, dtype=torch.long)
    cases: dict[str, Callable[[], object]] = {
        "needs either a map or an embedding": lambda: FullSoftmax(12),
        "or num_embeddings for its own": lambda: FullSoftmax(12, StandardMap(V, 12), num_embeddings=V),
        "use AdaptiveSoftmax": lambda: FullSoftmax(12, AdaptiveMap(V, 12, (5,))),  # type: ignore[arg-type]
        "not to Embedding: pass the embedding's map": lambda: FullSoftmax(12, nn.Embedding(V, 12)),  # type: ignore[arg-type]
        "hidden_dim is 0": lambda: FullSoftmax(0, num_embeddings=V),
        "num_embeddings is 0": lambda: layer.resize(0),
        "num_embeddings is -1": lambda: LAYERS["tied"]()["out"].resize(-1),
        "its last dimension must be 12": lambda: layer.log_prob(hidden[:, :5]),
        r"targets have the shape \(2, 1\), but hidden needs \(2,\)": lambda: layer.loss(hidden, ids.unsqueeze(1)),
        "The id 23 is outside": lambda: layer.loss(hidden, ids + V),
        "k is 24, but the vocabulary has 23": lambda: layer.top_k(hidden, 24),
        "k is 0": lambda: layer.top_k(hidden, 0),
    }
    for message, call in cases.items():
        with pytest.raises(UserError, match=message):
            call()
