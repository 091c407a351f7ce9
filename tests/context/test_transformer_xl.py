"""Against a plain loop over positions in float64, and against itself cut into other segments."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchdefine.context import TransformerXL, TransformerXLConfig, residual, transformer_xl
from torchdefine.context.relative_attention import ALIGNMENT, BLOCKED, ScoreLayout, distance_scores
from torchdefine.context.residual import feed_forward
from torchdefine.context.transformer_xl import Reach
from torchdefine.errors import UserError

SIZES = {"heads": 2, "head_dim": 3, "inner_dim": 10}


def make(reach: Reach, layers: int = 2, dim: int = 6, **more) -> TransformerXL:
    evaluation = {"eval_same_length": reach.same_length, "eval_clamp": reach.clamp}
    model = TransformerXL(
        dim, TransformerXLConfig(layers=layers, **SIZES | reach._asdict() | evaluation | more)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than they start, so that an error would show
            parameter.add_(torch.randn_like(parameter), alpha=0.4)
    model.prepare()
    return model


def sinusoid(distance: int, dim: int) -> Tensor:
    angles = [distance / 10_000 ** (2 * k / dim) for k in range(dim // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def naive_layer(
    model: TransformerXL, index: int, history: list[Tensor], own: range, reach: Reach, oldest: int, beside: list[Tensor]
) -> list[Tensor]:
    """One stream: what the layer gives at the positions ``own`` of a history of vectors that starts at 0.

    ``beside`` are the vectors that the tokens at these positions have for the layer.
    """
    layer = model.layers[index]
    dim, heads, width = model.output_dim, model.config.heads, model.config.head_dim
    normed = [layer.attention_norm(h) for h in history] if layer.pre_norm else history

    def head(weight: Tensor, vector: Tensor, h: int) -> Tensor:
        return weight[h * width : (h + 1) * width] @ vector

    to_query, to_key, to_value, to_distance = layer.attention.inward.weight.chunk(4)
    finished = []
    for i in own:
        mixed = []
        for h in range(heads):
            scores, values = [], []
            for j in range(oldest, i + 1):
                distance = i - j
                if reach.same_length and distance >= reach.memory:
                    continue
                vector = sinusoid(min(distance, reach.clamp) if reach.clamp else distance, dim)
                query = head(to_query, normed[i], h)
                content = (query + model.content_bias[h]) @ head(to_key, normed[j], h)
                place = (query + model.distance_bias[h]) @ head(to_distance, vector, h)
                scores.append((content + place) / math.sqrt(width))
                values.append(head(to_value, normed[j], h))
            mixed.append(sum(p * v for p, v in zip(torch.stack(scores).softmax(0), values, strict=True)))
        y = history[i] + layer.attention.outward.weight @ torch.cat(mixed)
        y = y if layer.pre_norm else layer.attention_norm(y)
        inner = layer.feed_forward_norm(y) if layer.pre_norm else y
        z = y + layer.reduce(F.relu(layer.expand(inner)))
        if model.config.layer_rank:
            z = z + layer.widen(beside[i - own.start] * torch.sigmoid(layer.gate(inner)))
        finished.append(z if layer.pre_norm else layer.feed_forward_norm(z))
    return finished


def naive(model: TransformerXL, segments: list[Tensor], reach: Reach) -> Tensor:
    """(B, T, d) segments one after another; only what a memory of ``reach.memory`` holds is seen of earlier ones."""
    streams = []
    for stream in range(segments[0].shape[0]):
        histories: list[list[Tensor]] = [[] for _ in model.layers]
        outputs: list[Tensor] = []
        for segment in segments:
            vectors, rank = list(segment[stream, :, : model.output_dim]), model.config.layer_rank or 0
            start = len(histories[0])
            for index, history in enumerate(histories):
                history[:] = [h.detach() for h in history] + vectors
                own, oldest = range(start, len(history)), max(start - reach.memory, 0)
                first = model.output_dim + index * rank
                beside = list(segment[stream, :, first : first + rank])
                vectors = naive_layer(model, index, history, own, reach, oldest, beside)
            outputs += vectors
        streams.append(torch.stack(outputs))
    return torch.stack(streams)


def run(model: TransformerXL, segments: list[Tensor]) -> Tensor:
    state = model.initial_state(segments[0].shape[0])
    outputs = []
    for segment in segments:
        output, state = model(segment, state)
        outputs.append(output)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize(
    "reach",
    [
        *(Reach(5), Reach(3), Reach(5, same_length=True), Reach(4, clamp=3), Reach(7, True, 2), Reach(1)),
        *(Reach(0), Reach(0, clamp=2)),
    ],
    ids=str,
)
def test_equals_a_loop_over_positions_with_gradients(reach: Reach, pre_norm: bool) -> None:
    model = make(reach, pre_norm=pre_norm)
    segments = [torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True) for length in (4, 3, 4)]
    ours, expected = run(model, segments), naive(model, segments, reach)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(expected)
    inputs = [*model.parameters(), *segments]
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_layers_take_vectors_of_their_own_gated(pre_norm: bool) -> None:
    model = make(Reach(4), dim=6 + 2 * 3, pre_norm=pre_norm, layer_rank=3, eval_memory=4)
    segments = [torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True) for length in (4, 3)]
    ours, expected = run(model, segments), naive(model, segments, Reach(4))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    weights, inputs = torch.randn_like(expected), [*model.parameters(), *segments]
    grads = [torch.autograd.grad((one * weights).sum(), inputs) for one in (ours, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
    model.eval()
    state, stepped = model.initial_state(2), []
    positions = [*torch.cat(segments, 1).split(1, dim=1)]
    for x in positions:
        y, state = model.step(x, state)
        stepped.append(y)
    torch.testing.assert_close(torch.cat(stepped, 1), run(model, positions))


def test_vectors_for_layers_start_without_effect() -> None:
    torch.manual_seed(1)
    plain = TransformerXL(6, TransformerXLConfig(layers=2, memory=3, **SIZES)).eval()
    given = TransformerXL(12, TransformerXLConfig(layers=2, memory=3, layer_rank=3, **SIZES)).eval()
    given.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(1, 5, 12)
    assert torch.equal(run(given, [x]), run(plain, [x[..., :6]]))


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("reach", [Reach(5), Reach(4, clamp=3), Reach(7, True, 2), Reach(1, same_length=True)], ids=str)
def test_step_by_step_is_the_whole(reach: Reach, pre_norm: bool) -> None:
    """In steps of one and of more positions, also of more than the memory holds."""
    dropout = dict.fromkeys(("input_dropout", "hidden_dropout", "output_dropout", "attention_dropout"), 0.2)
    evaluation = {f"eval_{name}": value for name, value in reach._asdict().items()}
    model = make(Reach(3), pre_norm=pre_norm, **dropout, **evaluation).eval()
    state = stepped = model.initial_state(2)
    for length in (1, 1, 4, 1, 9, 1, 1):
        x = torch.randn(2, length, 6, dtype=torch.float64)
        expected, state = model(x, state)
        y, stepped = model.step(x, stepped)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(stepped, state)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_without_a_memory_segments_begin_anew_and_steps_go_on_within_one(prepared: bool, pre_norm: bool) -> None:
    model = make(Reach(0, clamp=5), pre_norm=pre_norm).eval()
    model.prepare(prepared)
    x = torch.randn(2, 13, 6, dtype=torch.float64)
    whole = run(model, [x])
    parts = [x[:, :6], x[:, 6:7], x[:, 7:]]
    apart = torch.cat([run(model, [part]) for part in parts], 1)
    torch.testing.assert_close(run(model, parts), apart, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(apart, whole)
    assert model.carried == "no memory (distances clamped at 5)"
    model.keep_segment(13)
    state, stepped = model.initial_state(2), []
    for part in parts:
        y, state = model.step(part, state)
        stepped.append(y)
    torch.testing.assert_close(torch.cat(stepped, 1), whole, rtol=1e-10, atol=1e-10)
    remembering = make(Reach(4)).eval()
    remembering.keep_segment(13)
    assert remembering.evaluation == Reach(4)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_model_that_nobody_prepared_gives_the_same(pre_norm: bool) -> None:
    model = make(Reach(5), pre_norm=pre_norm)
    segments = [torch.randn(2, 4, 6, dtype=torch.float64) for _ in range(2)]
    expected = run(model, segments)
    model.prepare(False)
    assert not any(layer.fused or layer.attention.fused for layer in model.layers)
    torch.testing.assert_close(run(model, segments), expected)
    assert torch.equal(model.eval().step(segments[0], model.initial_state(2))[0], run(model, segments[:1]))


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fused_sums_and_norms_equal_plain_ones_with_gradients(
    pre_norm: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where the operations that kernels do run in plain torch."""
    model = make(Reach(5), pre_norm=pre_norm, hidden_dropout=dropout)
    segments = [torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs = [*model.parameters(), *segments]
    results, sums = [], []
    original = residual.residual_norm
    monkeypatch.setattr(residual, "residual_norm", lambda *args, **more: (sums.append(1), original(*args, **more))[1])
    for fused in (False, True):
        monkeypatch.setattr(residual, "has_fused_kernels", lambda x, fused=fused: fused)
        torch.manual_seed(1)  # torch draws the same masks for both on a CPU
        output = run(model, segments)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        results.append((output, *torch.autograd.grad((output * weights).sum(), inputs)))
        assert len(sums) == (2 * 2 * (1 if pre_norm else 2) if fused else 0)
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


def test_fused_sums_keep_the_stream_in_float32_and_give_products_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformerXL(16, TransformerXLConfig(layers=3, heads=2, head_dim=5, inner_dim=32, memory=8))
    segments = [torch.randn(2, 8, 16) for _ in range(2)]
    model.prepare()
    exact = run(model, segments)
    read: list[tuple[torch.dtype, torch.dtype]] = []
    model.layers[2].register_forward_pre_hook(lambda _, given: read.append((given[0].past.dtype, given[0].read.dtype)))
    monkeypatch.setattr(residual, "has_fused_kernels", lambda x: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = run(model, segments)
    assert rough.dtype == torch.float32
    assert set(read) == {(torch.float32, torch.bfloat16)}
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.1)


def test_float32_is_as_exact_as_float32_is() -> None:
    exact = make(Reach(6), layers=3)
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    single = TransformerXL(6, TransformerXLConfig(layers=3, memory=6, **SIZES))
    single.load_state_dict(exact.state_dict())
    single.prepare()
    torch.testing.assert_close(run(single, [x.float()]).double(), run(exact, [x]), rtol=1e-4, atol=1e-4)


@example(queries=1, memory=64, heads=2)
@example(queries=1, memory=63, heads=1)
@example(queries=16, memory=1, heads=1)
@given(queries=st.integers(1, 40), memory=st.integers(1, 70), heads=st.integers(1, 3))
@settings(max_examples=60)
def test_scores_by_distance_are_read_by_key_in_aligned_rows(queries: int, memory: int, heads: int) -> None:
    """The score of query i for what lies d back in stream b is made to be d + 1000 · i + 100,000 · b."""
    keys = memory + queries
    layout = ScoreLayout(queries, keys)
    one_feature = layout.distances(torch.device("cpu")).double()[:, None, None].expand(-1, heads, 1)  # (W, H, 1)
    marks = 1000.0 * torch.arange(queries) + 100_000.0 * torch.arange(2)[:, None]  # (B, T)
    asked = torch.stack((torch.ones_like(marks), marks), -1).double()[:, :, None].expand(-1, -1, heads, -1)
    vectors = torch.cat((one_feature, torch.ones_like(one_feature)), -1)
    by_key = distance_scores(asked, vectors, layout)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    expected = (memory + i - j + marks[:, None, :, None]).double().expand(2, heads, queries, keys)
    assert torch.equal(by_key, expected)
    assert layout.width % ALIGNMENT == 0
    assert all(stride % ALIGNMENT == 0 for stride in by_key.stride()[:-1])


def test_two_segments_are_one_where_the_memory_reaches() -> None:
    model = make(Reach(12), layers=3).eval()
    x = torch.randn(3, 12, 6, dtype=torch.float64)
    whole = run(model, [x])
    torch.testing.assert_close(run(model, [x[:, :5], x[:, 5:]]), whole)
    torch.testing.assert_close(run(model, [x[:, t : t + 1] for t in range(12)]), whole)
    short = make(Reach(3), layers=3).eval()
    short.load_state_dict(model.state_dict())
    assert not torch.allclose(run(short, [x[:, :5], x[:, 5:]]), whole)


def test_with_same_length_segments_do_not_matter_at_all() -> None:
    model = make(Reach(4, same_length=True), layers=3).eval()
    x = torch.randn(2, 15, 6, dtype=torch.float64)
    whole = run(model, [x])
    for length in (1, 2, 7):
        torch.testing.assert_close(run(model, list(x.split(length, dim=1))), whole)


def test_the_memory_is_of_fixed_shape_detached_and_starts_unseen() -> None:
    model = make(Reach(6))
    state = model.initial_state(2)
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    spoilt = ([torch.full_like(m, 1e3) for m in state[0]], state[1])
    torch.testing.assert_close(model(x, spoilt)[0], model(x, state)[0])
    for filled in (4, 6, 6):
        _, after = model(x, state)
        assert [m.shape for m in after[0]] == [m.shape for m in state[0]]
        assert not any(m.requires_grad for m in after[0])
        assert after[1].tolist() == [filled]
        state = after
    torch.testing.assert_close(state[0][0][:, -4:], x)


def test_nothing_ahead_changes_anything() -> None:
    model = make(Reach(4), layers=2).eval()
    x = torch.randn(1, 8, 6, dtype=torch.float64)
    other = x.clone()
    other[:, 5:] += 100
    torch.testing.assert_close(run(model, [x])[:, :5], run(model, [other])[:, :5], rtol=0, atol=0)


def test_evaluation_has_its_own_reach() -> None:
    model = make(Reach(2), eval_memory=9, eval_same_length=True, eval_clamp=5)
    assert model.initial_state(1)[0][0].shape == (1, 2, 6)
    model.eval()
    assert model.initial_state(1)[0][0].shape == (1, 9, 6)
    assert model.carried == "a memory of 9 positions (same length, distances clamped at 5)"
    segments = [torch.randn(1, 4, 6, dtype=torch.float64) for _ in range(3)]
    torch.testing.assert_close(run(model, segments), naive(model, segments, model.evaluation))


@pytest.mark.parametrize(
    ("changes", "reach"),
    [
        ({}, Reach(9, True, 5)),
        ({"memory": 3}, Reach(3, True, 5)),
        ({"clamp": 2}, Reach(9, True, 2)),
        ({"memory": 1, "clamp": 1}, Reach(1, True, 1)),
    ],
)
def test_evaluation_may_look_back_otherwise_for_a_while(changes: dict[str, int], reach: Reach) -> None:
    model = make(Reach(2), eval_memory=9, eval_same_length=True, eval_clamp=5)
    with model.remembering(**changes):
        assert model.evaluation == reach
    assert model.evaluation == Reach(9, True, 5)
    with make(Reach(2)).remembering(memory=0):
        pass
    with pytest.raises(UserError, match="memory of an evaluation is 0"), model.remembering(memory=0):
        pass


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("place", ["input", "hidden", "output", "attention"])
def test_dropout_counts_in_training_only(place: str, pre_norm: bool) -> None:
    model = make(Reach(4), pre_norm=pre_norm, **{f"{place}_dropout": 0.5})
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert not torch.equal(run(model, [x]), run(model, [x]))
    model.eval()
    assert torch.equal(run(model, [x]), run(model, [x]))


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("silent", [("reduce",), ("attention.outward", "expand")], ids=["attention", "feed-forward"])
def test_what_each_half_of_a_layer_adds_is_dropped(silent: tuple[str, ...], pre_norm: bool) -> None:
    model = make(Reach(4), layers=1, pre_norm=pre_norm, hidden_dropout=0.5)
    for name in silent:  # so that dropout elsewhere in the layer has only zeros to drop
        for parameter in model.layers[0].get_submodule(name).parameters():
            nn.init.zeros_(parameter)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert not torch.equal(run(model, [x]), run(model, [x]))


def test_dropout_inside_the_feed_forward_part_counts_by_itself() -> None:
    layer = make(Reach(4), hidden_dropout=0.5).layers[0]
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    one, other = (feed_forward(x, layer.expand, layer.reduce, layer.hidden_dropout, fused=False) for _ in range(2))
    assert not torch.equal(one.whole(), other.whole())


def test_half_precision_stays_close() -> None:
    """Under autocast, as on a GPU; nothing blocked may leak in bfloat16 or float16."""
    model = TransformerXL(16, TransformerXLConfig(layers=2, heads=2, head_dim=5, inner_dim=32, memory=8))
    model.prepare()
    segments = [torch.randn(2, 8, 16) for _ in range(2)]
    exact = run(model, segments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = run(model, segments)
        spoilt = ([torch.full_like(m, 50.0) for m in model.initial_state(2)[0]], torch.zeros(1, dtype=torch.long))
        again, state = model(segments[0], spoilt)
    assert state[0][1].dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=0.1, atol=0.1)
    torch.testing.assert_close(again, rough[:, :8], rtol=0.05, atol=0.05)
    assert torch.tensor(BLOCKED, dtype=torch.float16).isfinite()


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_memory_in_half_precision_loses_nothing(pre_norm: bool) -> None:
    """Products round what they read of it anyway; a norm before them does not, and its memory stays exact."""
    model = TransformerXL(
        16, TransformerXLConfig(layers=2, heads=2, head_dim=5, inner_dim=32, memory=8, pre_norm=pre_norm)
    )
    exact = model.initial_state(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model.initial_state(2)
        assert half[0][0].dtype == (torch.float32 if pre_norm else torch.bfloat16)
        for _ in range(3):
            segment = torch.randn(2, 5, 16)
            ours, half = model(segment, half)
            theirs, exact = model(segment, exact)
            assert torch.equal(ours, theirs)


def test_layers_compile_without_breaks() -> None:
    model = make(Reach(6), layers=2)
    x, state = torch.randn(2, 4, 6, dtype=torch.float64), model.initial_state(2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        torch.autograd.grad(compiled(x, state)[0].square().sum(), list(model.parameters())),
        torch.autograd.grad(model(x, state)[0].square().sum(), list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_compiled_layers_share_what_is_compiled_and_give_the_same_numbers() -> None:
    plain = TransformerXL(32, TransformerXLConfig(layers=4, heads=2, head_dim=9, inner_dim=48, memory=16))
    plain.prepare()
    compiled = copy.deepcopy(plain)
    compiled.compile_layers()
    counters = torch._dynamo.utils.counters
    counters.clear()
    x, one, other = torch.randn(2, 16, 32), plain.initial_state(2), compiled.initial_state(2)
    for _ in range(2):
        expected, one = plain(x, one)
        ours, other = compiled(x, other)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        for a, b in zip(
            torch.autograd.grad(ours.square().sum(), list(compiled.parameters())),
            torch.autograd.grad(expected.square().sum(), list(plain.parameters())),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the first layer's input needs no gradient


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_gives_the_same_numbers(dtype: torch.dtype) -> None:
    model = TransformerXL(64, TransformerXLConfig(layers=2, heads=4, head_dim=17, inner_dim=128, memory=50)).cuda()
    model.prepare()
    segments = [torch.randn(3, 37, 64, device="cuda", requires_grad=True) for _ in range(2)]
    results = []
    for reference in (True, False):
        used = model.double() if reference else model.float()
        given = [s.double() if reference else s for s in segments]
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32 and not reference):
            output = run(used, given)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device="cuda").view(output.shape)
        gradients = torch.autograd.grad((output.double() * weights).sum(), [*used.parameters(), *given])
        results.append([output.double(), *(g.double() for g in gradients)])
    tolerance = 5e-3 if dtype == torch.float32 else 0.1
    for exact, ours in zip(*results, strict=True):
        assert (ours - exact).norm() <= tolerance * exact.norm()


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu() -> None:
    """Torch itself raises an error where something waits."""
    model = TransformerXL(
        32,
        TransformerXLConfig(
            layers=2,
            heads=2,
            head_dim=9,
            inner_dim=64,
            memory=16,
            input_dropout=0.1,
            hidden_dropout=0.1,
            output_dropout=0.1,
            attention_dropout=0.1,
        ),
    ).cuda()
    model.prepare()
    x, state = torch.randn(2, 16, 32, device="cuda"), model.initial_state(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output, state = model(x, state)
            output.float().square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all()


@pytest.mark.gpu
def test_a_step_can_be_captured_as_a_graph() -> None:
    model = TransformerXL(32, TransformerXLConfig(layers=2, heads=2, head_dim=9, inner_dim=64, memory=16)).cuda().eval()
    model.prepare()
    x = torch.randn(2, 16, 32, device="cuda")
    expected, after = model(x, model.initial_state(2))
    memories, filled = model.initial_state(2)
    with torch.no_grad():
        model(x, (memories, filled))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, (new, now_filled) = model(x, (memories, filled))
            for old, fresh in zip(memories, new, strict=True):
                old.copy_(fresh)
            filled.copy_(now_filled)
    graph.replay()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    graph.replay()
    torch.testing.assert_close(output, model(x, after)[0], rtol=1e-4, atol=1e-4)


class Adapter(nn.Module):
    """A low rank beside a layer that stays as it is, as LoRA puts it there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("names", [("inward",), ("outward",), ("inward", "outward")], ids=str)
@pytest.mark.parametrize("kernels", [False, True])
def test_adapters_around_attention_count_as_merged_weights_do(
    names: tuple[str, ...], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer_xl, "has_attention_kernel", lambda device, dtype, width: kernels)
    merged = make(Reach(5))
    adapted = copy.deepcopy(merged)
    adapters = []
    for one, other in zip(adapted.layers, merged.layers, strict=True):
        for name in names:
            adapter = Adapter(getattr(one.attention, name))
            setattr(one.attention, name, adapter)
            getattr(other.attention, name).weight.data += (adapter.up @ adapter.down).detach()
            adapters.append(adapter)
    adapted.prepare()
    segments = [torch.randn(2, length, 6, dtype=torch.float64) for length in (4, 3)]
    output = run(adapted, segments)
    torch.testing.assert_close(output, run(merged, segments))
    steps = [model.eval().step(segments[1], model.initial_state(2))[0] for model in (adapted, merged)]
    torch.testing.assert_close(*steps)
    gradients = torch.autograd.grad(output.square().sum(), [part for a in adapters for part in (a.down, a.up)])
    assert all(gradient.any() for gradient in gradients)


def test_bad_sizes_are_refused() -> None:
    for message, call in {
        "layers is 0, but must be at least 1": lambda: TransformerXLConfig(layers=0),
        "use an even width, such as 8": lambda: TransformerXL(7, TransformerXLConfig(heads=1)),
        r"10 heads do not divide the width 6: set context\.head_dim": lambda: TransformerXL(
            6, TransformerXLConfig(heads=10)
        ),
        "memory is -1, but must be at least 0": lambda: TransformerXLConfig(memory=-1),
        "^same_length is true, but with memory 0 no position": lambda: TransformerXLConfig(memory=0, same_length=True),
        "^eval_same_length is true, but with eval_memory 0": lambda: TransformerXLConfig(
            memory=0, eval_same_length=True
        ),
        "clamp is 0, but must be at least 1": lambda: TransformerXLConfig(clamp=0),
        "inner_dim is 0, but must be at least 1": lambda: TransformerXLConfig(inner_dim=0),
        r"attention_dropout is 1\.0, but must be at least 0 and below 1": lambda: TransformerXLConfig(
            attention_dropout=1.0
        ),
    }.items():
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("pre_norm", [False, True])
def test_kernels_are_no_less_exact_than_plain_torch_under_autocast(
    pre_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TransformerXL(
        64, TransformerXLConfig(layers=3, heads=4, head_dim=17, inner_dim=130, memory=50, pre_norm=pre_norm)
    ).cuda()
    model.prepare()
    segments = [torch.randn(3, 37, 64, device="cuda", requires_grad=True) for _ in range(2)]
    results = []
    for kind in ("exact", "plain", "fused"):
        used = copy.deepcopy(model).double() if kind == "exact" else model
        given = [s.detach().to(used.content_bias.dtype).requires_grad_() for s in segments]
        if kind == "plain":
            monkeypatch.setattr(residual, "has_fused_kernels", lambda x: False)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=kind != "exact"):
            output = run(used, given)
        monkeypatch.undo()
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device="cuda").view(output.shape)
        gradients = torch.autograd.grad((output.double() * weights).sum(), [*used.parameters(), *given])
        results.append([output.double(), *(g.double() for g in gradients)])
    for exact, plain, ours in zip(*results, strict=True):
        assert (ours - exact).norm() <= 1.3 * (plain - exact).norm() + 2e-3 * exact.norm()
