"""Output layers that are tied to the finished vectors of an embedding, against plain loops."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine import AdaptiveMap, DeFINE, ProjectiveMap, StandardMap
from torchdefine.embedding import DenseMLP, DenseProjection, TokenEmbedding, table
from torchdefine.embedding.kept import Kept
from torchdefine.errors import UserError
from torchdefine.modes import evaluating, reading
from torchdefine.output import AdaptiveSoftmax, AdaptiveTableSoftmax, FullSoftmax, MixtureSoftmax
from torchdefine.output.adaptive import BandedSoftmax

V, N, M, CUTOFFS = 40, 8, 12, (10, 25)
RANKS = torch.randperm(V, generator=torch.Generator().manual_seed(1))


def define(map_layer: nn.Module, **settings: float) -> TokenEmbedding:
    return DeFINE.over(map_layer, M, expand_dim=32, depth=3, **settings)  # type: ignore[arg-type]


EMBEDDINGS: dict[str, Callable[[], TokenEmbedding]] = {
    "standard, DeFINE": lambda: define(StandardMap(V, N, scale=0.5)),
    "standard, padding": lambda: define(StandardMap(V, N, padding_idx=3)),
    "standard, output norm": lambda: define(StandardMap(V, N, padding_idx=3), output_norm=True),
    "projective, DeFINE": lambda: define(ProjectiveMap(V, 6, N)),
    "adaptive, DeFINE": lambda: define(AdaptiveMap(V, N, CUTOFFS, division=2, counts=(V - RANKS).tolist())),
    "standard, projection": lambda: TokenEmbedding(StandardMap(V, N), DenseProjection(N, M), M),
    "standard, MLP": lambda: TokenEmbedding(StandardMap(V, N), DenseMLP(N, 20, M), M),
    "projective alone": lambda: TokenEmbedding(ProjectiveMap(V, N, M)),
    "adaptive, equal ids": lambda: TokenEmbedding(AdaptiveMap(V, M, CUTOFFS, division=2)),
}


def outputs_for(embedding: TokenEmbedding, hidden_dim: int) -> dict[str, Callable[[], nn.Module]]:
    found: dict[str, Callable[[], nn.Module]] = {"full": lambda: FullSoftmax(hidden_dim, embedding)}
    if isinstance(embedding.map, AdaptiveMap):
        found["bands"] = lambda: AdaptiveSoftmax(hidden_dim, embedding)
    else:
        counts = (V - RANKS).tolist()
        found["bands"] = lambda: AdaptiveTableSoftmax(hidden_dim, embedding, CUTOFFS, counts=counts)
    found["mixture"] = lambda: MixtureSoftmax(hidden_dim, FullSoftmax(M, embedding), 3)
    found["mixture of bands"] = lambda: MixtureSoftmax(hidden_dim, found["bands"](), 3)
    return found


def plain_log_prob(layer: nn.Module, vectors: Tensor, hidden: Tensor) -> Tensor:
    """(T, V), from the vectors of all tokens, (V, m), by what each layer is defined as."""
    if isinstance(layer, MixtureSoftmax):
        latents = torch.tanh(layer.latent(hidden)).unflatten(1, (layer.components, -1))
        parts = [plain_log_prob(layer.component, vectors, latents[:, k]) for k in range(layer.components)]
        prior = F.log_softmax(layer.prior(hidden), -1)
        return torch.logsumexp(torch.stack(parts, 1) + prior.unsqueeze(-1), 1)
    bias = layer.bias if layer.bias is not None else torch.zeros(V, dtype=hidden.dtype)
    if not isinstance(layer, BandedSoftmax):
        projected = hidden if layer.projection is None else layer.projection(hidden)
        return F.log_softmax(torch.stack([projected @ row for row in vectors], 1) + bias, -1)
    ranks = torch.arange(V) if layer.ranks is None else layer.ranks
    columns: list[Tensor] = [torch.empty(0)] * V
    bands = [(ranks >= start) & (ranks < stop) for start, stop in zip((0, *CUTOFFS), (*CUTOFFS, V), strict=True)]
    for band, inside in enumerate(bands):
        ids = inside.nonzero().flatten().tolist()
        own = getattr(layer, "projections", None)
        projected = own[str(band)](hidden) if own else hidden if layer.projection is None else layer.projection(hidden)
        logits = [projected @ vectors[i] + bias[i] for i in ids]
        if band == 0:
            added = getattr(layer, "cluster_bias", torch.zeros(len(CUTOFFS)))
            logits += [projected @ row + b for row, b in zip(layer.cluster_weight, added, strict=True)]
        log_probs = F.log_softmax(torch.stack(logits, 1), -1)
        if band == 0:
            of_bands = log_probs[:, len(ids) :]
        for place, i in enumerate(ids):
            columns[i] = log_probs[:, place] + (of_bands[:, band - 1] if band else 0)
    return torch.stack(columns, 1)


def plain_vectors(embedding: TokenEmbedding) -> Tensor:
    """One token after another through map and unit."""
    vectors = [embedding(torch.tensor([i]))[0] for i in range(V)]
    return torch.stack(vectors)


def gradients(loss: Tensor, hidden: Tensor, *modules: nn.Module) -> list[Tensor]:
    parameters = [p for module in modules for p in module.parameters()]
    found = torch.autograd.grad(loss, [hidden, *parameters], allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in found]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "full") for name in EMBEDDINGS),
        *((name, "bands") for name in ("standard, DeFINE", "projective, DeFINE", "adaptive, DeFINE", "standard, MLP")),
        ("adaptive, equal ids", "bands"),
        ("standard, padding", "mixture"),
        ("standard, projection", "mixture of bands"),
        ("adaptive, DeFINE", "mixture of bands"),
    ],
)
def test_parity_with_a_plain_loop(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TOKENS_AT_ONCE", V if "MLP" in name else 7)
    hidden_dim = M if kind == "full" and name == "standard, DeFINE" else 9
    embedding = EMBEDDINGS[name]()
    layer = outputs_for(embedding, hidden_dim)[kind]().double()
    embedding.double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    hidden, targets = torch.randn(11, hidden_dim, dtype=torch.float64, requires_grad=True), torch.randint(V, (11,))
    targets[4] = -100
    for options in ({}, {"label_smoothing": 0.2}, {"hint": layer.host_hint(targets.numpy())}):
        smoothing = options.get("label_smoothing", 0.0)
        expected = plain_log_prob(layer, plain_vectors(embedding), hidden)
        plain = F.cross_entropy(expected, targets, label_smoothing=smoothing)
        loss = layer.loss(hidden, targets, **options)
        torch.testing.assert_close(loss, plain, rtol=0, atol=1e-10)
        found, wanted = (gradients(one, hidden, embedding, layer) for one in (loss, plain))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.log_prob(hidden), expected, rtol=0, atol=1e-10)
    per_token = layer.loss(hidden, targets, reduction="none")
    torch.testing.assert_close(per_token, F.cross_entropy(expected, targets, reduction="none"), rtol=0, atol=1e-10)
    with evaluating(embedding, layer), torch.no_grad():
        torch.testing.assert_close(layer.log_prob(hidden), expected, rtol=0, atol=1e-10)
        assert torch.equal(layer.predict(hidden), expected.argmax(-1))


def test_dropout_is_drawn_for_each_row_and_the_same_when_layers_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "TOKENS_AT_ONCE", 16)
    embedding = define(StandardMap(V, N), dropout=0.4).double()
    unit, drawn = embedding.unit, []

    def remembered(rows: int, device: torch.device) -> list[Tensor]:
        drawn.append(type(unit).drawn(unit, rows, device))
        return drawn[-1]

    monkeypatch.setattr(unit, "drawn", remembered)
    weights = torch.randn(V, M, dtype=torch.float64)
    parameters = list(embedding.parameters())
    found = embedding.finished()
    gradient = torch.autograd.grad((found * weights).sum(), parameters)
    masks = [torch.cat(layer) for layer in zip(*drawn, strict=True)]
    assert len({tuple(row.tolist()) for row in masks[0]}) == V
    plain = embedding.map.table.weight
    skipped = plain
    for index, (layer, kept) in enumerate(zip(unit.expansions, masks, strict=True)):
        plain = layer.linear(unit._with_skip(skipped, plain, index))
        plain = F.gelu(plain if layer.norm is None else layer.norm(plain)) * kept / 0.6
    plain = unit.last(unit._with_skip(skipped, plain, len(masks)))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad((plain * weights).sum(), parameters), rtol=0, atol=1e-10)
    assert not torch.equal(embedding.finished(), found)


def test_dropout_keeps_what_it_should_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TOKENS_AT_ONCE", 500)
    torch.manual_seed(0)
    embedding = DeFINE.over(StandardMap(2000, N), M, expand_dim=64, depth=2, dropout=0.3)
    masks = embedding.unit.drawn(2000, torch.device("cpu"))
    assert [mask.shape[0] for mask in masks] == [2000]
    assert float(masks[0].float().mean()) == pytest.approx(0.7, abs=0.01)
    with torch.no_grad():
        whole = embedding.eval().finished()
        mean = torch.stack([embedding.train().finished() for _ in range(200)]).mean(0)
    torch.testing.assert_close(mean, whole, rtol=0, atol=0.5)
    assert float((mean - whole).square().mean()) < 0.02 * float(whole.square().mean())


@pytest.mark.parametrize("kind", ["row_dropout", "map_dropout"])
def test_whole_rows_and_features_are_dropped_where_they_are_looked_up_alone(kind: str) -> None:
    embedding = define(StandardMap(V, N))
    setattr(embedding, kind, 0.9)
    assert not torch.equal(embedding(torch.arange(V)), plain_vectors(embedding.eval()))
    torch.testing.assert_close(embedding.train().finished(), plain_vectors(embedding.eval()))


def test_unit_of_somebody_else() -> None:
    unit = nn.Sequential(nn.Linear(N, M), nn.Tanh())
    embedding = TokenEmbedding(StandardMap(V, N), unit, M)
    torch.testing.assert_close(embedding.finished(), unit(embedding.map.table.weight))


@pytest.fixture
def pair() -> nn.ModuleDict:
    embedding = define(AdaptiveMap(V, N, CUTOFFS, division=2))
    return nn.ModuleDict({"embedding": embedding, "out": AdaptiveSoftmax(M, embedding)})


def units_called(pair: nn.ModuleDict, calls: Callable[[], object]) -> int:
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    handle = pair["embedding"].unit.last.register_forward_hook(counted)
    calls()
    handle.remove()
    return count


@torch.no_grad()
def is_fresh(pair: nn.ModuleDict) -> bool:
    hidden = torch.linspace(-1, 1, M, dtype=next(pair.parameters()).dtype).expand(2, M)
    twin = copy.deepcopy(pair)
    assert twin["out"]._embedding[0] is twin["embedding"]
    twin["embedding"]._kept = Kept()
    return torch.allclose(pair["out"].log_prob(hidden), twin["out"].log_prob(hidden), rtol=1e-6, atol=1e-6)


def test_vectors_are_kept_in_evaluation_until_weights_change(pair: nn.ModuleDict) -> None:
    pair.eval()
    hidden = torch.randn(2, M)
    with torch.no_grad():

        def read() -> None:
            for _ in range(3):
                with reading(pair) as twin:
                    twin["out"].log_prob(hidden)

        assert units_called(pair, read) == 1
        assert units_called(pair, read) == 0
    changes: list[Callable[[], object]] = [
        lambda: next(pair.parameters()).data.add_(1) if pair.train() else None,
        lambda: nn.init.normal_(pair["embedding"].unit.last.weight),
        lambda: pair.load_state_dict({name: weight + 0.1 for name, weight in pair.state_dict().items()}),
        lambda: pair["embedding"].resize(V + 3),
        lambda: pair["embedding"].look_up(torch.randn(V + 3, M)),
        lambda: pair["embedding"].look_up(None),
        lambda: pair["embedding"].reset_parameters(),
        lambda: pair.double(),
    ]
    for change in changes:
        pair.eval()
        assert is_fresh(pair)
        with torch.no_grad():
            before = pair["embedding"].finished()
            change()
            pair.eval()
            assert is_fresh(pair)
            after = pair["embedding"].finished()
        assert before.shape != after.shape or before.dtype != after.dtype or not torch.equal(before, after)


def test_an_evaluation_in_training_leaves_nothing_behind(pair: nn.ModuleDict) -> None:
    """A recorded step changes weights without torch's noticing."""
    pair.train()
    for _ in range(2):
        with evaluating(pair), torch.no_grad():
            assert is_fresh(pair)
            assert pair["embedding"].finished() is pair["embedding"].finished()
        for parameter in pair.parameters():
            version = parameter._version
            parameter.data.mul_(1.5)
            assert parameter._version == version


def test_what_inference_mode_kept_can_be_differentiated_through(pair: nn.ModuleDict) -> None:
    pair.eval().requires_grad_(False)
    with torch.inference_mode():
        pair["out"].log_prob(torch.randn(2, M))
    hidden = torch.randn(2, M, requires_grad=True)
    pair["out"].loss(hidden, torch.tensor([1, 30])).backward()
    assert hidden.grad is not None


def test_a_stored_table_is_what_the_output_compares_with(pair: nn.ModuleDict) -> None:
    pair.eval()
    table = torch.randn(V, M)
    pair["embedding"].look_up(table)
    assert pair["embedding"].finished().data_ptr() == table.data_ptr()
    pair["embedding"].look_up(table.bfloat16())
    with torch.no_grad():
        torch.testing.assert_close(pair["embedding"].finished(), table.bfloat16().float())
        assert pair["embedding"].finished() is pair["embedding"].finished()


def test_nothing_is_counted_or_saved_twice(pair: nn.ModuleDict) -> None:
    assert set(pair["out"].state_dict()) == {"cluster_weight"}
    before = [p.detach().clone() for p in pair.parameters()]
    other = copy.deepcopy(pair)
    nn.init.zeros_(other["embedding"].unit.last.weight)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.parameters(), strict=True))
    other.load_state_dict(pair.state_dict())
    hidden = torch.randn(2, M)
    torch.testing.assert_close(other["out"].log_prob(hidden), pair["out"].log_prob(hidden))


def test_columns_of_bands_start_like_the_rows_beside_them() -> None:
    wide = DeFINE.over(StandardMap(3000, 64), 256, expand_dim=512)
    wide.map.reset_parameters(0.02)
    size = float(wide.eval().table().square().mean().sqrt())
    layer = AdaptiveTableSoftmax(256, wide, (500, 900, 1500))
    assert float(layer.cluster_weight.detach().square().mean().sqrt()) == pytest.approx(size, rel=0.1)
    with torch.device("meta"):
        AdaptiveTableSoftmax(M, define(StandardMap(V, N)), CUTOFFS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(pair: nn.ModuleDict, dtype: torch.dtype) -> None:
    hidden, targets = torch.randn(30, M), torch.randint(V, (30,))
    with torch.autocast("cpu", dtype):
        loss = pair["out"].loss(hidden, targets, hint=pair["out"].host_hint(targets.numpy()))
    found = torch.autograd.grad(loss, list(pair.parameters()))
    exact = pair["out"].loss(hidden, targets)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    for gradient, wanted in zip(found, torch.autograd.grad(exact, list(pair.parameters())), strict=True):
        assert gradient.dtype == torch.float32
        assert float((gradient - wanted).norm()) < 0.05 * float(wanted.norm())


def test_bad_arguments_are_refused() -> None:
    adaptive, standard = define(AdaptiveMap(V, N, CUTOFFS, division=2)), define(StandardMap(V, N))
    cases: dict[str, Callable[[], object]] = {
        "not to StandardMap": lambda: AdaptiveSoftmax(M, standard),
        "not AdaptiveMap": lambda: AdaptiveTableSoftmax(M, adaptive, CUTOFFS),
        "Finished vectors have no projection": lambda: AdaptiveTableSoftmax(M, standard, CUTOFFS, (True,) * 3),
    }
    for message, call in cases.items():
        with pytest.raises(UserError, match=message):
            call()
