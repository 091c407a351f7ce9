import pytest
import torch
from benchmarks.measuring import Setting
from benchmarks.texts import WIKIPEDIA_CUTOFFS, WIKIPEDIA_SHARES, WIKIPEDIA_SIZE, real_text

from benchmarks import output
from torchdefine.recipe import load_recipe
from torchdefine.training.precision import Precision

SETTING = Setting(torch.device("cpu"), small=True, repeats=2)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    hidden, targets = output.data_of(SETTING)[2]
    return hidden[:80], targets[:80]


def loss_and_gradient(module: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, torch.Tensor]:
    loss = output.both_passes(module, *data, Precision("fp32", torch.device("cpu")))()
    return float(loss), next(p.grad for p in module.parameters() if p.grad is not None and p.grad.ndim == 2)


def test_full_softmaxes_agree(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    size = output.data_of(SETTING)[0]
    everything, chunked = output.AllLogits(size), output.full(size, data[1])
    with torch.no_grad():
        chunked.tied.table.weight.copy_(everything.weight)
    (loss, gradient), (ours, our_gradient) = (loss_and_gradient(m, data) for m in (everything, chunked))
    assert ours == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("division", [1, 4])
def test_adaptive_softmaxes_agree(data: tuple[torch.Tensor, torch.Tensor], division: int) -> None:
    size, cutoffs, _ = output.data_of(SETTING)
    ours = output.adaptive(size, cutoffs, division, data[1], roomy=True)
    theirs = output.TorchAdaptiveLoss(output.WIDTH, size, cutoffs, division)
    with torch.no_grad():
        head, *tails = ours.output._bands()
        theirs.softmax.head.weight.copy_(head.weight)
        for index, band in enumerate(tails):
            theirs.softmax.tail[index][0].weight.copy_(ours.tied.projections[index])
            theirs.softmax.tail[index][1].weight.copy_(band.weight)
    assert loss_and_gradient(ours, data)[0] == pytest.approx(loss_and_gradient(theirs, data)[0], rel=1e-5)


@pytest.mark.parametrize("how", [output.FINISHED, output.PROJECTED, output.BANDS])
def test_what_is_tied_to_finished_vectors_compares_with_them(how: str) -> None:
    recipe, targets = load_recipe("ptb/awd-lstm-define-finished"), torch.randint(200, (30,))
    module = output.tied(recipe, 200, how, targets)
    hidden = torch.randn(30, 400)
    table = module.tied.eval().table()
    if how == output.BANDS:
        expected = module.output.log_prob(hidden)
        module.tied.look_up(table)
        torch.testing.assert_close(module.output.log_prob(hidden), expected)
    else:
        expected = torch.log_softmax(hidden @ table.T, -1)
    loss = module.train()(hidden, targets)
    torch.testing.assert_close(loss, torch.nn.functional.nll_loss(expected, targets))


def test_what_is_not_installed_is_said_to_be_missing() -> None:
    contestants = {c.name: c for group in output.groups(SETTING) for c in group.contestants}
    assert contestants["ours, adaptive, recorded"].lacks
    assert "cut-cross-entropy" in contestants
    assert output.missing("a_package_of_nobody", SETTING) == "the package a_package_of_nobody is not installed"


def test_spread_ids_have_the_shares_of_wikipedia() -> None:
    text = real_text(SETTING.data)
    ids = text.wide_ids((200, 500), torch.device("cpu"), WIKIPEDIA_SIZE)
    assert torch.equal(ids, text.wide_ids((200, 500), torch.device("cpu"), WIKIPEDIA_SIZE))
    counts = torch.bucketize(ids.flatten(), torch.tensor(WIKIPEDIA_CUTOFFS), right=True).bincount()
    assert (counts / ids.numel()).tolist() == pytest.approx(WIKIPEDIA_SHARES, abs=2e-3)
    assert int(ids.max()) < WIKIPEDIA_SIZE


def test_a_large_vocabulary_is_taken_as_it_is() -> None:
    text = real_text(SETTING.data)
    own = text._replace(vocabulary=WIKIPEDIA_SIZE).wide_ids((1, 100), torch.device("cpu"), WIKIPEDIA_SIZE)
    assert own[0].tolist() == text.tokens[:100].tolist()
