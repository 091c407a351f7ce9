import copy

import pytest
import torch

from torchdefine import DeFINE, StandardMap
from torchdefine.context import Transformer, TransformerConfig
from torchdefine.embedding import TokenEmbedding, VocabularyFacts
from torchdefine.errors import UserError
from torchdefine.output import FullSoftmax
from torchdefine.recipe import load_recipe
from torchdefine.sealed_tensors import write_safetensors
from torchdefine.tasks.translation import Translator, build_translator

PAD = 0


def transformer(width: int = 16) -> Transformer:
    return Transformer(
        width, TransformerConfig(heads=2, hidden_dim=32, encoder_layers=2, decoder_layers=2, dropout=0.0)
    )


def one_table() -> Translator:
    table = StandardMap(30, 16)
    table.reset_parameters(0.25)
    embedding = TokenEmbedding(table)
    return Translator(embedding, embedding, transformer(), FullSoftmax(16, table), PAD)


def two_units() -> Translator:
    target = DeFINE(30, 16, map_dim=8, expand_dim=32)
    return Translator(DeFINE(40, 16, map_dim=8, expand_dim=32), target, transformer(), FullSoftmax(16, target.map), PAD)


def one_unit() -> Translator:
    target = DeFINE(30, 16, map_dim=8, expand_dim=32)
    source = TokenEmbedding.beside(StandardMap(40, 8), target)
    return Translator(source, target, transformer(), FullSoftmax(16, num_embeddings=30), PAD)


MAKERS = [one_table, two_units, one_unit]


def pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.randint(1, 30, (4, 7))
    source[1, 4:] = source[2, 1:] = PAD
    targets = torch.randint(1, 30, (4, 6))
    inputs = torch.cat((torch.ones(4, 1, dtype=torch.long), targets[:, :-1]), 1)
    targets[3, 2:] = -100
    return source, inputs, targets


@pytest.mark.parametrize("make", MAKERS)
def test_loss_is_that_of_the_steps_own_log_probabilities(make) -> None:
    model = make().double().eval()
    source, inputs, targets = pairs()
    losses, state = model(source, inputs, targets, reduction="sum")
    assert state is None
    decoder = model.start(source)
    total = 0.0
    for place in range(inputs.shape[1]):
        log_probs, decoder = model.step(inputs[:, place], decoder)
        counted = targets[:, place] != -100
        total = total - log_probs[counted, targets[counted, place]].sum()
    torch.testing.assert_close(losses.objective, total)


@pytest.mark.parametrize("make", MAKERS)
def test_padding_never_changes_a_score(make) -> None:
    model = make().double().eval()
    source, inputs, targets = pairs()
    together = model(source, inputs, targets, reduction="none")[0].objective
    for row in range(4):
        length = int((source[row] != PAD).sum())
        counted = int((targets[row] != -100).sum())
        alone = model(
            source[row : row + 1, :length],
            inputs[row : row + 1, :counted],
            targets[row : row + 1, :counted],
            reduction="none",
        )[0].objective
        torch.testing.assert_close(alone[0], together[row, :counted])


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_shared_is_saved_once_and_stays_shared(make, tmp_path) -> None:
    model = make()
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    write_safetensors(tmp_path / "model.safetensors", state)
    twin = copy.deepcopy(make())
    twin.load_state_dict(state)
    source, inputs, targets = pairs()
    expected = model.eval()(source, inputs, targets)[0].objective
    torch.testing.assert_close(twin.eval()(source, inputs, targets)[0].objective, expected)
    twin(source, inputs, targets)[0].objective.backward()
    assert all(p.grad is not None for p in twin.parameters())
    if make is not two_units:
        assert twin.source.unit is twin.target.unit
    parts = model.parameters_by_part()
    assert parts["total"] == sum(p.numel() for p in set(model.parameters()))
    units = 0 if make is one_table else sum(p.numel() for p in model.target.unit.parameters())
    assert parts["define"] == (2 * units if make is two_units else units)
    assert parts["define"] + parts["context"] + parts["input_output"] == parts["total"]
    assert list(model.embeddings()) == (["both sides"] if make is one_table else ["source", "target"])


@pytest.mark.parametrize("make", MAKERS)
def test_a_translator_learns_to_copy(make) -> None:
    torch.manual_seed(1)
    model = make().train()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for _ in range(60):
        source = torch.randint(3, 12, (32, 4))
        inputs = torch.cat((torch.ones(32, 1, dtype=torch.long), source[:, :-1]), 1)
        loss = model(source, inputs, source)[0].objective
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1.9 < 2.1 < losses[0]  # ln 9 = 2.2 without looking at the source


def test_label_smoothing_is_for_training_only() -> None:
    model = one_table()
    model.label_smoothing = 0.3
    source, inputs, targets = pairs()
    smoothed = model.train()(source, inputs, targets)[0].objective
    plain = model.eval()(source, inputs, targets)[0].objective
    assert abs(float(smoothed.detach()) - float(plain.detach())) > 1e-3


def test_widths_and_vocabularies_must_fit() -> None:
    table, wide = StandardMap(30, 16), TokenEmbedding(StandardMap(30, 24))
    embedding = TokenEmbedding(table)
    with pytest.raises(UserError, match="source embedding gives vectors 24 wide, but the Transformer takes 16"):
        Translator(wide, embedding, transformer(), FullSoftmax(16, table), PAD)
    with pytest.raises(UserError, match="but the output layer takes 24"):
        Translator(embedding, embedding, transformer(), FullSoftmax(24, table), PAD)
    with pytest.raises(UserError, match="output has 31 tokens, the target side 30"):
        Translator(embedding, embedding, transformer(), FullSoftmax(16, num_embeddings=31), PAD)


@pytest.mark.parametrize(
    ("name", "changes", "millions"),
    [
        ("wmt14/transformer", {}, 92.0),
        ("wmt14/transformer-define", {}, 68.97),
        ("wmt14/transformer-define", {"source": {"share": "unit"}}, 68.53),
        ("wmt14/transformer-define-tied", {}, 53.09),
        ("wmt14/transformer-sru", {}, 89.73),
    ],
)
def test_the_papers_models_have_the_papers_sizes(name: str, changes: dict, millions: float) -> None:
    with torch.device("meta"):
        model = build_translator(load_recipe(name, changes), VocabularyFacts(31_138), VocabularyFacts(31_138), PAD)
    assert model.parameters_by_part()["total"] / 1e6 == pytest.approx(millions, abs=0.02)


def test_recipes_choose_an_embedding_for_either_side() -> None:
    def built(name: str, **changes: dict) -> Translator:
        return build_translator(load_recipe(name, changes), VocabularyFacts(400), VocabularyFacts(300), PAD)

    own = {"share": "nothing", "embedding": {"map_dim": 256}, "unit": {"kind": "none"}}
    model = built("tatoeba/laptop-define", context={"heads": 2, "hidden_dim": 32}, source=own)
    assert (model.source.unit, model.source.num_embeddings, model.target.num_embeddings) == (None, 400, 300)
    assert isinstance(model.target, DeFINE)
    for name, source, message in (
        ("tatoeba/laptop-define", {"share": "embedding", "unit": {"kind": "none"}}, "the source side cannot differ"),
        ("tatoeba/laptop-define", {"share": "embedding"}, "needs one BPE for both languages"),
        ("tatoeba/laptop-define", {"embedding": {"mpa_dim": 9}}, r"'source\.embedding\.mpa_dim' is unknown"),
        ("tatoeba/laptop-define", {"unit": {"cutoffs": [9]}}, r"'source\.unit\.cutoffs' is unknown"),
        ("tatoeba/laptop", {"share": "unit"}, "There is no unit to share"),
    ):
        with pytest.raises(UserError, match=message):
            built(name, source={"share": "nothing", **source})
