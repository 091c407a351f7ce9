import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchdefine.context import Transformer, TransformerConfig, residual
from torchdefine.context.residual import Stream, Update
from torchdefine.context.transformer import DecoderLayer, EncoderLayer, sinusoids
from torchdefine.errors import UserError


def config(norm: str = "pre", **changes) -> TransformerConfig:
    sizes = {"heads": 2, "hidden_dim": 40, "encoder_layers": 2, "decoder_layers": 3, "dropout": 0.0}
    return TransformerConfig(**sizes | {"norm": norm} | changes)


def fill(attention: nn.MultiheadAttention, projections: list[nn.Linear], out: nn.Linear) -> None:
    """Give torch's attention our weights: one above the other, as both lay them out."""
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        attention.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        attention.out_proj.weight.copy_(out.weight)
        attention.out_proj.bias.copy_(out.bias)


def randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)


def copy_rest(theirs: nn.Module, ours: EncoderLayer | DecoderLayer) -> None:
    theirs.linear1.load_state_dict(ours.feed_forward.expand.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.reduce.state_dict())
    names = ["attend", "feed"] if isinstance(ours, EncoderLayer) else ["attend", "look", "feed"]
    for index, name in enumerate(names, start=1):
        getattr(theirs, f"norm{index}").load_state_dict(getattr(ours, name).norm.state_dict())


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layers_equal_torchs_own(norm: str) -> None:
    sizes = {"dim_feedforward": 40, "dropout": 0.0, "batch_first": True, "norm_first": norm == "pre"}
    visible = torch.ones(3, 7, dtype=torch.bool)
    visible[1, 4:] = visible[2, 1:] = False
    mask = visible[:, None, None, :]

    encoder = EncoderLayer(16, config(norm)).double()
    randomise(encoder)
    reference = nn.TransformerEncoderLayer(16, 2, **sizes).double()
    fill(reference.self_attn, [encoder.within.query_key_value], encoder.within.out)
    copy_rest(reference, encoder)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    ours = encoder(encoder.attend.enter(x), mask, nn.LayerNorm(16).double()).past
    torch.testing.assert_close(ours[visible], reference(x, src_key_padding_mask=~visible)[visible])

    decoder = DecoderLayer(16, config(norm)).double()
    randomise(decoder)
    twin = nn.TransformerDecoderLayer(16, 2, **sizes).double()
    fill(twin.self_attn, [decoder.within.query_key_value], decoder.within.out)
    fill(twin.multihead_attn, [decoder.across.query, decoder.across.key_value], decoder.across.out)
    copy_rest(twin, decoder)
    y = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    z = y.detach().clone().requires_grad_()
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    stream, _ = decoder(decoder.attend.enter(y), decoder.across.remember(x), mask, nn.LayerNorm(16).double())
    ours = stream.past
    theirs = twin(z, x, tgt_mask=later, memory_key_padding_mask=~visible)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(y.grad, z.grad)
    torch.testing.assert_close(decoder.within.query_key_value.weight.grad, twin.self_attn.in_proj_weight.grad)
    torch.testing.assert_close(
        torch.cat((decoder.across.query.weight.grad, decoder.across.key_value.weight.grad)),
        twin.multihead_attn.in_proj_weight.grad,
    )


@settings(max_examples=25)
@given(
    norm=st.sampled_from(["pre", "post"]),
    feed_forward=st.sampled_from(["relu", "sru"]),
    batch=st.integers(1, 4),
    hypotheses=st.integers(1, 3),
    source=st.integers(1, 6),
    target=st.integers(1, 6),
)
def test_cached_decoding_equals_uncached(
    norm: str, feed_forward: str, batch: int, hypotheses: int, source: int, target: int
) -> None:
    model = Transformer(16, config(norm, feed_forward=feed_forward)).double().eval()
    randomise(model)
    x = torch.randn(batch, source, 16, dtype=torch.float64)
    visible = torch.arange(source) < torch.randint(1, source + 1, (batch, 1))
    y = torch.randn(batch * hypotheses, target, 16, dtype=torch.float64)
    memory = model.encode(x, visible)
    state = model.start(memory, visible, hypotheses)
    steps = []
    for place in range(target):
        hidden, state = model.step(y[:, place], state)
        steps.append(hidden)
    whole = model.decode(y, memory.repeat_interleave(hypotheses, 0), visible.repeat_interleave(hypotheses, 0))
    torch.testing.assert_close(torch.stack(steps, 1), whole)


FEED_FORWARD = pytest.mark.parametrize("feed_forward", ["relu", "sru"])


@FEED_FORWARD
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_changes_nothing(norm: str, feed_forward: str) -> None:
    model = Transformer(16, config(norm, feed_forward=feed_forward)).double().eval()
    randomise(model)
    x, y = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    visible = torch.ones(2, 5, dtype=torch.bool)
    alone = model.decode(y, model.encode(x, visible), visible)
    padded = torch.cat((x, 100 * torch.randn(2, 3, 16, dtype=torch.float64)), 1)
    mask = torch.cat((visible, torch.zeros(2, 3, dtype=torch.bool)), 1)
    longer = torch.cat((y, torch.randn(2, 2, 16, dtype=torch.float64)), 1)
    torch.testing.assert_close(model.decode(longer, model.encode(padded, mask), mask)[:, :4], alone)


@FEED_FORWARD
def test_a_place_does_not_see_later_ones(feed_forward: str) -> None:
    model = Transformer(16, config(feed_forward=feed_forward)).double().eval()
    x, visible = torch.randn(1, 3, 16, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    y = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    (model.decode(y, model.encode(x, visible), visible)[0, 2] @ torch.randn(16, dtype=torch.float64)).backward()
    assert y.grad[0, :3].abs().sum(-1).min() > 0
    assert torch.equal(y.grad[0, 3:], torch.zeros(2, 16, dtype=torch.float64))


@FEED_FORWARD
def test_selected_rows_go_on_as_they_would_have(feed_forward: str) -> None:
    model = Transformer(16, config(feed_forward=feed_forward)).double().eval()
    x, visible = torch.randn(3, 4, 16, dtype=torch.float64), torch.ones(3, 4, dtype=torch.bool)
    y = torch.randn(6, 3, 16, dtype=torch.float64)  # two hypotheses for each source
    state = model.start(model.encode(x, visible), visible, 2)
    _, state = model.step(y[:, 0], state)
    _, state = model.step(y[:, 1], state)
    expected, _ = model.step(y[:, 2], copy.copy(state))
    rows, sources = torch.tensor([5, 4, 1, 1]), torch.tensor([2, 0])
    found, _ = model.step(y[rows, 2], state.select(rows, sources))
    torch.testing.assert_close(found, expected[rows])


def test_positions_are_those_of_the_formula() -> None:
    table = sinusoids(7, 3, 8, torch.zeros((), dtype=torch.float64))
    for row, position in zip(table, (7, 8, 9), strict=True):
        angles = torch.tensor([position / 10_000 ** (2 * i / 8) for i in range(4)], dtype=torch.float64)
        torch.testing.assert_close(row, torch.cat((angles.sin(), angles.cos())))


def test_positions_are_added_to_vectors() -> None:
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(Transformer(16, config())._placed(x), x + sinusoids(0, 3, 16, x))


def test_every_matrix_starts_by_glorots_rule_and_every_bias_at_zero() -> None:
    for name, linear in Transformer(16, config()).named_modules():
        if isinstance(linear, nn.Linear):
            parts = {"query_key_value": 3, "key_value": 2}.get(name.rpartition(".")[2], 1)
            for matrix in linear.weight.chunk(parts):
                bound = math.sqrt(6 / sum(matrix.shape))
                assert 0.95 * bound < matrix.abs().max() <= bound, name
            assert not linear.bias.any(), name


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(
    ("option", "part"),
    [
        pytest.param("dropout", lambda model, x: model._placed(x), id="input"),
        pytest.param("dropout", lambda model, x: model.encoder[0].feed_forward(x)[0].whole(), id="feed-forward"),
        pytest.param(
            "dropout",
            lambda model, x: model.encoder[0].attend.after(Stream(x, x), Update(x), nn.LayerNorm(16)).past,
            id="residual",
        ),
        pytest.param("attention_dropout", lambda model, x: model.encoder[0].within(x)[0].whole(), id="within"),
        pytest.param(
            "attention_dropout",
            lambda model, x: model.decoder[0].across(x, model.decoder[0].across.remember(x), None).whole(),
            id="across",
        ),
    ],
)
def test_each_dropout_counts_in_training_only(
    option: str, part: Callable[[Transformer, Tensor], Tensor], norm: str
) -> None:
    model, x = Transformer(16, config(norm, **{option: 0.5})), torch.randn(2, 5, 16)
    assert not torch.equal(part(model, x), part(model, x))
    model.eval()
    assert torch.equal(part(model, x), part(model, x))


def test_an_sru_reads_the_sequence_where_a_feed_forward_layer_would_read_a_place() -> None:
    """A linear map of an SRU's outputs, r · c; dropout has one mask for all places."""
    layer = EncoderLayer(16, config(feed_forward="sru", sru_dropout=0.5)).double().feed_forward
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    u = x @ layer.recurrent.linear.weight.T
    z, forget, reset = u.chunk(3, -1)
    c, found = torch.zeros(3, 40, dtype=torch.float64), []
    for place in range(7):
        r = torch.sigmoid(reset[:, place] + layer.recurrent.peepholes[1] * c)
        f = torch.sigmoid(forget[:, place] + layer.recurrent.peepholes[0] * c)
        c = f * c + (1 - f) * z[:, place]
        found.append(r * c)
    hidden = torch.stack(found, 1)
    torch.testing.assert_close(layer.eval()(x)[0].whole(), layer.reduce(hidden), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer(x)[1][0], c, rtol=1e-10, atol=1e-10)
    torch.manual_seed(3)
    dropped = layer.train()(x)[0].whole()
    torch.manual_seed(3)
    kept = torch.empty(1, 3, 40, dtype=torch.float64).bernoulli_(0.5).transpose(0, 1)
    torch.testing.assert_close(dropped, layer.reduce(hidden * kept * 2))


def test_the_base_body_has_the_known_number_of_parameters() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Transformer(512, TransformerConfig()).parameters()) == 44_140_544


def test_the_residual_stream_is_summed_in_float32_under_autocast() -> None:
    model = Transformer(16, config()).eval()
    x, visible = torch.randn(2, 3, 16), torch.ones(2, 3, dtype=torch.bool)
    seen = []
    model.encoder[1].register_forward_pre_hook(lambda _, given: seen.append(given[0].past.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model.encode(x.bfloat16(), visible)
    assert seen == [torch.float32]


def test_autocast_leaves_a_model_in_float64_as_it_is() -> None:
    model = Transformer(16, config()).double().eval()
    x, visible = torch.randn(2, 3, 16, dtype=torch.float64), torch.ones(2, 3, dtype=torch.bool)
    plain = model.encode(x, visible)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.encode(x, visible), plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "cannot be split into 3 heads"),
        ({"decoder_layers": 0}, "decoder_layers is 0"),
        ({"norm": "mid"}, "norm is 'mid', but must be one of pre, post"),
        ({"dropout": 1.0}, r"dropout is 1\.0"),
    ],
)
def test_bad_settings(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Transformer(16, config(**changes))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fused_sums_and_norms_equal_plain_ones_with_gradients(
    norm: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where the operations that kernels do run in plain torch."""
    model = Transformer(16, config(norm, dropout=dropout)).double()
    model.prepare()
    randomise(model)
    x, y = (torch.randn(3, length, 16, dtype=torch.float64, requires_grad=True) for length in (5, 4))
    visible = torch.arange(5) < torch.tensor([[5], [3], [1]])
    inputs = [x, y, *model.parameters()]
    results, sums = [], []
    original = residual.residual_norm
    monkeypatch.setattr(residual, "residual_norm", lambda *args, **more: (sums.append(1), original(*args, **more))[1])
    for fused in (False, True):
        monkeypatch.setattr(residual, "has_fused_kernels", lambda x, fused=fused: fused)
        torch.manual_seed(1)  # torch draws the same masks for both on a CPU
        output = model.decode(y, model.encode(x, visible), visible)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        results.append((output, *torch.autograd.grad((output * weights).sum(), inputs)))
        assert len(sums) == (2 * 2 + 3 * 3 if fused else 0)
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
