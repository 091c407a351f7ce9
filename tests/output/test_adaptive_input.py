"""Adaptive input and output with a projection in every band, as Baevski & Auli (2019) and fairseq have them."""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.embedding import AdaptiveMap
from torchdefine.output import AdaptiveSoftmax

V, CUTOFFS, DIVISION = 40, (8, 20), 2
EDGES = (0, *CUTOFFS, V)
BANDS = range(len(CUTOFFS) + 1)
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def public_checkpoint(width: int) -> dict[str, Tensor]:
    """Weights under the names and in the shapes of a language model of fairseq; tied ones stand there twice."""
    drawn = partial(torch.randn, dtype=torch.float64)
    widths = [width // DIVISION**band for band in BANDS]
    state = {"embed_tokens._float_tensor": torch.zeros(1)}
    for band, (start, stop) in enumerate(itertools.pairwise(EDGES)):
        state[f"embed_tokens.embeddings.{band}.0.weight"] = drawn(stop - start, widths[band])
        state[f"embed_tokens.embeddings.{band}.1.weight"] = drawn(width, widths[band])
    state["adaptive_softmax.head.word_proj.weight"] = state["embed_tokens.embeddings.0.0.weight"]
    state["adaptive_softmax.head.class_proj.weight"] = drawn(len(CUTOFFS), width)
    for tail in range(len(CUTOFFS)):
        state[f"adaptive_softmax.tail.{tail}.0.weight"] = state[f"embed_tokens.embeddings.{tail + 1}.1.weight"]
        state[f"adaptive_softmax.tail.{tail}.2.weight"] = state[f"embed_tokens.embeddings.{tail + 1}.0.weight"]
    return state


def ours(state: dict[str, Tensor], width: int) -> nn.ModuleDict:
    """The same weights in our layers."""
    table = AdaptiveMap(V, width, CUTOFFS, DIVISION, output_dim=width)
    model = nn.ModuleDict({"map": table, "out": AdaptiveSoftmax(width, table)}).double()
    named = {"out.cluster_weight": state["adaptive_softmax.head.class_proj.weight"]}
    for band in BANDS:
        named[f"map.bands.{band}.weight"] = state[f"embed_tokens.embeddings.{band}.0.weight"]
        named[f"map.projections.{band}"] = state[f"embed_tokens.embeddings.{band}.1.weight"].T
    model.load_state_dict(named)
    return model


def naive_vector(state: dict[str, Tensor], token: int) -> Tensor:
    band = next(band for band in BANDS if token < EDGES[band + 1])
    row = state[f"embed_tokens.embeddings.{band}.0.weight"][token - EDGES[band]]
    return state[f"embed_tokens.embeddings.{band}.1.weight"] @ row


def naive_log_prob(state: dict[str, Tensor], hidden: Tensor, token: int) -> Tensor:
    """One token after one vector, from the weights that stand in the checkpoint for the output."""
    head = "adaptive_softmax.head"
    columns = torch.cat((state[f"{head}.word_proj.weight"], state[f"{head}.class_proj.weight"])) @ hidden
    first = F.log_softmax(columns, 0)
    if token < CUTOFFS[0]:
        return first[token]
    tail = next(tail for tail in range(len(CUTOFFS)) if token < EDGES[tail + 2])
    narrow = state[f"adaptive_softmax.tail.{tail}.0.weight"].T @ hidden
    within = F.log_softmax(state[f"adaptive_softmax.tail.{tail}.2.weight"] @ narrow, 0)
    return first[CUTOFFS[0] + tail] + within[token - EDGES[tail + 1]]


def test_a_public_checkpoint_fits_and_gives_the_same_numbers_and_gradients() -> None:
    """Tied weights are one tensor under two names, so that their gradients add up."""
    state = public_checkpoint(width=16)
    model = ours(state, width=16)
    leaves = {name: tensor.requires_grad_() for name, tensor in state.items() if "_float_tensor" not in name}
    ids = torch.arange(V)
    theirs = torch.stack([naive_vector(state, token) for token in range(V)])
    torch.testing.assert_close(model["map"](ids), theirs, **EXACT)

    hidden, targets = torch.randn(V, 16, dtype=torch.float64), torch.randperm(V)
    losses = torch.stack([-naive_log_prob(state, *pair) for pair in zip(hidden, targets.tolist(), strict=True)])
    torch.testing.assert_close(model["out"].loss(hidden, targets, reduction="none"), losses, **EXACT)

    (losses.sum() + theirs.square().sum()).backward()
    (model["out"].loss(hidden, targets, reduction="sum") + model["map"](ids).square().sum()).backward()
    for band in BANDS:
        row, projection = (leaves[f"embed_tokens.embeddings.{band}.{part}.weight"].grad for part in (0, 1))
        torch.testing.assert_close(model["map"].bands[band].weight.grad, row, **EXACT)
        torch.testing.assert_close(model["map"].projections[band].grad, projection.T, **EXACT)
    columns = leaves["adaptive_softmax.head.class_proj.weight"].grad
    torch.testing.assert_close(model["out"].cluster_weight.grad, columns, **EXACT)


@pytest.mark.parametrize("ties", [(), (True, True, True), (True, False, True), (False, False, False)])
@pytest.mark.parametrize("hidden_dim", [12, 20])
def test_every_band_has_the_projection_that_the_settings_say(ties: tuple[bool, ...], hidden_dim: int) -> None:
    table = AdaptiveMap(V, 16, CUTOFFS, DIVISION, output_dim=12, counts=torch.randperm(V))
    model = nn.ModuleDict({"map": table, "out": AdaptiveSoftmax(hidden_dim, table, ties)}).double()
    layer = model["out"]
    hidden = torch.randn(5, hidden_dim, dtype=torch.float64, requires_grad=True)

    def naive(vector: Tensor, token: int) -> Tensor:
        vector = vector if layer.projection is None else layer.projection.weight @ vector
        rank = int(table.ranks[token])
        band = next(band for band in BANDS if rank < EDGES[band + 1])

        def narrow(band: int) -> Tensor:
            if (ties or (False, True, True))[band]:
                return table.projection_of(band) @ vector
            return layer.projections[str(band)].weight @ vector

        first = F.log_softmax(torch.cat((table.bands[0].weight, layer.cluster_weight)) @ narrow(0), 0)
        if band == 0:
            return first[rank]
        within = F.log_softmax(table.bands[band].weight @ narrow(band), 0)
        return first[CUTOFFS[0] + band - 1] + within[rank - EDGES[band]]

    theirs = torch.stack([torch.stack([naive(vector, token) for token in range(V)]) for vector in hidden])
    torch.testing.assert_close(layer.log_prob(hidden), theirs, **EXACT)
    targets = torch.tensor([0, 9, 17, 25, 39])
    parameters = [hidden, *model.parameters()]
    expected = torch.autograd.grad(F.nll_loss(theirs, targets), parameters, allow_unused=True)
    found = torch.autograd.grad(layer.loss(hidden, targets), parameters, allow_unused=True)
    for mine, reference in zip(found, expected, strict=True):
        if mine is None:
            assert reference is None
        else:
            torch.testing.assert_close(mine, reference, **EXACT)
