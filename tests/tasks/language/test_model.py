import copy

import pytest
import torch
from torch import Tensor, nn

from torchdefine import AdaptiveMap, DeFINE, StandardMap
from torchdefine.context import LSTM, LSTMConfig
from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.modes import prepare
from torchdefine.ops import locked_dropout
from torchdefine.output import AdaptiveSoftmax, FullSoftmax, HostHint
from torchdefine.tasks.language import LanguageLossConfig, LanguageModel


def adaptive_model() -> LanguageModel:
    bands = AdaptiveMap(50, 16, (10, 30), division=2)
    bands.reset_parameters(0.25)
    return LanguageModel(
        DeFINE.over(bands, 24, expand_dim=64),
        LSTM(24, LSTMConfig(layers=2, hidden_dim=20, output_dim=16)),
        AdaptiveSoftmax(16, bands),
    )


def standard_model() -> LanguageModel:
    table = StandardMap(50, 16)
    return LanguageModel(TokenEmbedding(table), LSTM(16, output_dim=16), FullSoftmax(16, table))


@pytest.mark.parametrize("make", [adaptive_model, standard_model])
def test_loss_is_the_mean_of_its_own_log_probabilities(make) -> None:
    model = make().double().eval()
    ids = torch.randint(0, 50, (3, 8))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    losses, state = model(inputs, targets, model.initial_state(3))
    log_probs, same_state = model.log_prob(inputs, model.initial_state(3))
    torch.testing.assert_close(losses.cross_entropy, -log_probs.gather(-1, targets.unsqueeze(-1)).mean())
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 7, dtype=torch.float64))
    torch.testing.assert_close(state[0][0], same_state[0][0])


@pytest.mark.parametrize("make", [adaptive_model, standard_model])
def test_tied_tables_are_saved_once_and_stay_tied(make) -> None:
    model = make()
    state = model.state_dict()
    pointers = [tensor.data_ptr() for tensor in state.values()]
    assert len(set(pointers)) == len(pointers)
    twin = copy.deepcopy(model)
    table = twin.embedding.map.bands[0].weight if make is adaptive_model else twin.embedding.map.table.weight
    before = twin.log_prob(torch.tensor([[1]]), twin.initial_state(1))[0]
    with torch.no_grad():
        table.mul_(3)
    after = twin.output.log_prob(torch.randn(1, 1, 16))
    assert after.std() > before.std()
    assert torch.equal(
        model.log_prob(torch.tensor([[1]]), model.initial_state(1))[0],
        make_equal(model).log_prob(torch.tensor([[1]]), model.initial_state(1))[0],
    )


def make_equal(model: LanguageModel) -> LanguageModel:
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    return twin


def test_parameters_by_part_add_up() -> None:
    model = adaptive_model()
    parts = model.parameters_by_part()
    assert parts["define"] == sum(p.numel() for p in model.embedding.unit.parameters())
    assert parts["define"] + parts["context"] + parts["input_output"] == parts["total"]
    tables = 10 * 16 + 20 * 8 + 20 * 4 + (8 + 4) * 16 + 2 * 16
    assert parts["input_output"] == tables
    assert standard_model().parameters_by_part()["define"] == 0


def test_label_smoothing_counts_in_training_only() -> None:
    table = StandardMap(50, 16)
    model = LanguageModel(
        TokenEmbedding(table), LSTM(16, output_dim=16), FullSoftmax(16, table), LanguageLossConfig(label_smoothing=0.3)
    )
    ids = torch.randint(0, 50, (2, 5))
    smoothed, _ = model(ids, ids, model.initial_state(2))
    model.eval()
    plain, _ = model(ids, ids, model.initial_state(2))
    assert smoothed.cross_entropy != plain.cross_entropy


def test_output_dropout_zeroes_whole_features_in_training() -> None:
    table = StandardMap(50, 16)
    seen = []

    class Watched(FullSoftmax):
        def loss(self, hidden, targets, **options):
            seen.append(hidden)
            return super().loss(hidden, targets, **options)

    model = LanguageModel(
        TokenEmbedding(table), LSTM(16, output_dim=16), Watched(16, table), LanguageLossConfig(output_dropout=0.5)
    )
    ids = torch.randint(0, 50, (2, 5))
    model(ids, ids, model.initial_state(2))
    zero = seen[0] == 0
    assert torch.equal(zero.all(1), zero.any(1))
    assert zero.any()
    model.eval()
    model(ids, ids, model.initial_state(2))
    assert not (seen[1] == 0).any()


@pytest.mark.parametrize("length", [1, 2, 6])
def test_penalties_against_a_plain_loop_in_float64(length: int) -> None:
    table = StandardMap(50, 16)
    options = LanguageLossConfig(activation_penalty=2.0, temporal_penalty=1.0)
    model = LanguageModel(TokenEmbedding(table), LSTM(16, output_dim=16), FullSoftmax(16, table), options).double()
    ids = torch.randint(0, 50, (3, length))
    losses, _ = model(ids, ids, model.initial_state(3))
    hidden, _ = model.hidden(ids, model.initial_state(3))
    squares = sum(h**2 for h in hidden.flatten().tolist()) / hidden.numel()
    steps = [(hidden[:, t + 1] - hidden[:, t]).square().sum() for t in range(length - 1)]
    expected = losses.cross_entropy + 2.0 * squares + (1.0 * sum(steps) / (3 * len(steps) * 16) if steps else 0)
    torch.testing.assert_close(losses.objective, expected)
    gradient = torch.autograd.grad(losses.objective, model.embedding.map.table.weight, retain_graph=True)[0]
    plain = torch.autograd.grad(losses.cross_entropy, model.embedding.map.table.weight)[0]
    assert not torch.allclose(gradient, plain)
    model.eval()
    losses, _ = model(ids, ids, model.initial_state(3))
    assert losses.objective is losses.cross_entropy


def test_activation_penalty_sees_dropped_vectors_and_the_temporal_one_whole_ones() -> None:
    table = StandardMap(50, 16)
    parts = (TokenEmbedding(table), LSTM(16, output_dim=16), FullSoftmax(16, table))
    ids = torch.randint(0, 50, (3, 6))
    penalties = {}
    for name in ("activation_penalty", "temporal_penalty"):
        model = LanguageModel(*parts, LanguageLossConfig(output_dropout=0.5, **{name: 1.0}))
        hidden, _ = model.hidden(ids, model.initial_state(3))
        torch.manual_seed(5)
        losses, _ = model(ids, ids, model.initial_state(3))
        torch.manual_seed(5)
        dropped = locked_dropout(hidden, 0.5, time_dim=1)
        penalties[name] = (losses.objective - losses.cross_entropy, hidden, dropped)
    penalty, _, dropped = penalties["activation_penalty"]
    torch.testing.assert_close(penalty, dropped.square().mean(), rtol=1e-3, atol=1e-6)
    penalty, hidden, _ = penalties["temporal_penalty"]
    torch.testing.assert_close(penalty, hidden.diff(dim=1).square().mean(), rtol=1e-3, atol=1e-6)


def test_row_dropout_zeroes_whole_token_types() -> None:
    embedding = TokenEmbedding(StandardMap(2000, 8))
    embedding.row_dropout = 0.5
    ids = torch.arange(2000).repeat(2, 1)
    vectors = embedding(ids)
    assert torch.equal(vectors[0], vectors[1])
    dropped = (vectors[0] == 0).all(-1).float().mean()
    assert 0.4 < dropped < 0.6
    kept = (vectors[0] != 0).any(-1)
    torch.testing.assert_close(vectors[0][kept], 2 * embedding.map.table.weight[kept])
    embedding.eval()
    torch.testing.assert_close(embedding(ids)[0], embedding.map.table.weight)


@pytest.mark.parametrize("with_unit", [False, True])
def test_dropped_features_are_the_same_at_all_positions_of_a_text(with_unit: bool) -> None:
    table = StandardMap(50, 400)
    unit = nn.Linear(400, 400).double() if with_unit else None
    embedding = TokenEmbedding(table, unit).double()
    embedding.map_dropout = 0.3
    ids = torch.randint(0, 50, (3, 7))
    torch.manual_seed(2)
    vectors = embedding(ids)
    torch.manual_seed(2)
    kept = torch.empty(3, 1, 400, dtype=torch.float64).bernoulli_(0.7)
    assert 0.6 < kept.mean() < 0.8
    assert not torch.equal(kept[0], kept[1])
    expected = [[row * mask[0] / 0.7 for row in table.table.weight[text]] for text, mask in zip(ids, kept, strict=True)]
    expected = torch.stack([torch.stack(rows) for rows in expected])
    expected = expected if unit is None else unit(expected)
    torch.testing.assert_close(vectors, expected, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(vectors.square().sum(), table.table.weight, retain_graph=True)
    wanted = torch.autograd.grad(expected.square().sum(), table.table.weight)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    several = embedding(torch.zeros(5, dtype=torch.long))
    assert not torch.equal(several[0], several[1]), "ids of no text are dropped each by itself"
    embedding.eval()
    torch.testing.assert_close(embedding(ids), table.table.weight[ids] if unit is None else unit(table(ids)))


def test_dropped_features_go_by_text_in_a_prepared_model() -> None:
    """An LSTM reads by position, and equal tokens are computed once; neither may be where a text has its own mask."""
    model = standard_model()
    model.embedding.map_dropout = 0.5
    seen = []
    model.context.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    prepare(model)
    assert not model.embedding.fused
    assert not model.embedding.shares
    model.hidden(torch.full((4, 30), 7), model.initial_state(4))
    assert torch.equal(seen[0][:, :1].expand_as(seen[0]), seen[0])
    assert not torch.equal(seen[0][0], seen[0][1])
    prepare(model.eval())
    assert model.embedding.fused


def dropping_model() -> LanguageModel:
    table = StandardMap(50, 16)
    embedding = DeFINE.over(table, 24, expand_dim=64, dropout=0.2)
    return LanguageModel(embedding, LSTM(24, output_dim=16), FullSoftmax(16, table))


@pytest.mark.parametrize("make", [adaptive_model, standard_model, dropping_model])
@pytest.mark.parametrize("training", [True, False])
def test_a_hint_changes_nothing_but_what_is_waited_for(make, training: bool) -> None:
    model = make().double().train(training)
    prepare(model)
    tokens = torch.randint(0, 50, (4, 61))
    ids, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[3, 40:] = -100
    found = []
    for hint in (None, model.host_hint(targets.numpy())):
        torch.manual_seed(1)
        losses, _ = model(ids, targets, model.initial_state(4), hint=hint)
        found.append((losses.objective, *torch.autograd.grad(losses.objective, list(model.parameters()))))
    for without, with_it in zip(*found, strict=True):
        torch.testing.assert_close(with_it, without)


def test_a_hint_leaves_room_for_every_id() -> None:
    """The ids are the targets but for the first of each row and what stands for padding: here none is among them."""
    ids, targets = torch.tensor([[0, 1, 1], [10, 1, 49]]), torch.tensor([[1, 1, 1], [1, -100, -100]])
    model, dropping = adaptive_model(), dropping_model()
    prepare(model)
    prepare(dropping)
    hint = model.host_hint(targets.numpy())
    assert hint.distinct is not None
    assert hint.distinct >= len(ids.unique())
    assert dropping.host_hint(targets.numpy()) == HostHint(None, None)


def test_a_hint_holds_in_either_mode() -> None:
    """With dropout in its unit an embedding shares equal tokens in evaluation only."""
    table = AdaptiveMap(60, 16, (20, 40), division=2)
    embedding = DeFINE.over(table, 24, expand_dim=64, dropout=0.5)
    model = LanguageModel(embedding, LSTM(24, output_dim=16), AdaptiveSoftmax(16, table))
    tokens = torch.randint(0, 60, (4, 61))
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    for asked, used in ((False, True), (True, False)):
        prepare(model.train(asked))
        hint = model.host_hint(targets.numpy())
        prepare(model.train(used))
        losses, _ = model(ids, targets, model.initial_state(4), hint=hint)
        assert losses.objective.isfinite()


def test_losses_that_cannot_be_are_refused() -> None:
    for message, settings in {
        "dropout is 1": {"output_dropout": 1.0},
        "activation_penalty is -1": {"activation_penalty": -1},
        "temporal_penalty is -1": {"temporal_penalty": -1},
    }.items():
        with pytest.raises(UserError, match=message):
            LanguageLossConfig(**settings)


def test_widths_that_do_not_meet_are_refused() -> None:
    table = StandardMap(50, 16)
    with pytest.raises(UserError, match="embedding gives vectors 16 wide, but the context model takes 8"):
        LanguageModel(TokenEmbedding(table), LSTM(8, output_dim=16), FullSoftmax(16, table))
    with pytest.raises(UserError, match="context model gives vectors 12 wide"):
        LanguageModel(TokenEmbedding(table), LSTM(16, output_dim=12), FullSoftmax(16, table))


@pytest.mark.parametrize("make", [adaptive_model, standard_model])
def test_nothing_of_a_step_is_copied_into_another_order(make) -> None:
    """What goes into the LSTM lies position by position, and so does what the output layer takes of it."""
    model = make().train()
    prepare(model)
    strides = []
    model.context.layers[0].register_forward_pre_hook(lambda _module, given: strides.append(given[0].is_contiguous()))
    ids = torch.randint(0, 50, (5, 30))
    hidden, _ = model.hidden(ids, model.initial_state(5))
    rows, targets = model.output._as_they_lie(hidden, ids)
    assert strides == [True]
    assert rows.is_contiguous()
    assert rows.data_ptr() == hidden.data_ptr()
    assert torch.equal(rows.view(30, 5, -1).transpose(0, 1), hidden)
    assert torch.equal(targets.view(30, 5).T, ids)


@pytest.mark.parametrize("make", [adaptive_model, standard_model])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_order_in_memory_changes_neither_losses_nor_gradients(make, label_smoothing: float) -> None:
    model = make().double()
    lying = torch.randn(9, 4, 16, dtype=torch.float64).transpose(0, 1).requires_grad_()  # (B, T, n), as of an LSTM
    copied = lying.detach().contiguous().requires_grad_()
    targets = torch.randint(0, 50, (4, 9))
    targets[1, 3:] = -100
    for reduction in ("mean", "sum", "none"):
        results = []
        for hidden in (lying, copied):
            loss = model.output.loss(hidden, targets, reduction=reduction, label_smoothing=label_smoothing)
            weights = torch.linspace(1, 2, loss.numel(), dtype=torch.float64).view(loss.shape)
            results.append((loss, *torch.autograd.grad((loss * weights).sum(), hidden)))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [adaptive_model, standard_model])
def test_a_step_gives_what_the_whole_text_does(make) -> None:
    model = make().double().eval()
    ids, state = torch.randint(5, (2, 6)), model.initial_state(2)
    expected, _ = model.log_prob(ids, state)
    for place in range(6):
        log_probs, state = model.step(ids[:, place : place + 1], state)
        torch.testing.assert_close(log_probs, expected[:, place])


def test_embeddings_of_others_get_ids_as_they_are() -> None:
    """Ours may take positions first, since it knows nothing but tokens; who reads places must not."""

    class WithPlaces(TokenEmbedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + torch.arange(ids.shape[1])[None, :, None]

    table = StandardMap(50, 16)
    ids, seen = torch.randint(0, 50, (3, 5)), []
    for embedding in (WithPlaces(table), TokenEmbedding(table)):
        model = LanguageModel(embedding, LSTM(16, output_dim=16), FullSoftmax(16, table)).eval()
        vectors = []
        model.context.register_forward_pre_hook(lambda _module, given, kept=vectors: kept.append(given[0]))
        embedding.register_forward_hook(lambda _module, given, _output: seen.append(given[0].shape))
        prepare(model)
        model.hidden(ids, model.initial_state(3))
        torch.testing.assert_close(vectors[0], embedding(ids))
    assert set(seen) == {(3, 5)}


@pytest.mark.parametrize("shape", [(24,), (6, 4)])
def test_targets_of_another_shape_are_refused_in_the_callers_shapes(shape: tuple[int, ...]) -> None:
    lying = torch.randn(6, 4, 16).transpose(0, 1)  # (4, 6, 16), as of an LSTM
    expected = rf"shape \({', '.join(map(str, shape))},?\), but hidden needs \(4, 6\)"
    for output in (standard_model().output, adaptive_model().output):
        with pytest.raises(UserError, match=expected):
            output.loss(lying, torch.zeros(shape, dtype=torch.long))
