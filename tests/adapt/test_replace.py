"""Any module: which tables are found, what takes their place, what is refused, and that refusals change nothing."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.adapt.model_identity import model_hash
from torchdefine import DeFINE, DeFINEBag, UnitConfig, replace_embeddings, restore
from torchdefine.adapt.stand_in import MapHead, SharedStandIn, StandIn, VectorsHead, cache_tables
from torchdefine.adapt.survey import survey
from torchdefine.embedding.token_embedding import sizes_read
from torchdefine.errors import UserError
from torchdefine.tables import dense_table, quantised_table, svd_table

SIZES = {"map_dim": 8, "expand_dim": 16, "depth": 2}
pytestmark = pytest.mark.filterwarnings("ignore:The replacement of")  # the tables are tiny


class Classifier(nn.Module):
    """A user's own LSTM classifier, as the tutorials have it."""

    def __init__(self, rows: int = 50, width: int = 24, padding_idx: int | None = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width, padding_idx)
        self.lstm = nn.LSTM(width, 10, batch_first=True)
        self.out = nn.Linear(10, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(ids))[0][:, -1])


class Tied(nn.Module):
    """An encoder and a decoder table of one matrix, and a head of the same."""

    def __init__(self, rows: int = 40, width: int = 12) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"tokens": nn.Embedding(rows, width), "positions": nn.Embedding(16, width)})
        self.decoder = nn.ModuleDict({"tokens": nn.Embedding(rows, width)})
        self.head = nn.Linear(width, rows)
        self.decoder["tokens"].weight = self.encoder["tokens"].weight
        self.head.weight = self.encoder["tokens"].weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.encoder["tokens"](ids) + self.encoder["positions"](places) + self.decoder["tokens"](ids)
        return self.head(x)


def ids_for(rows: int) -> Tensor:
    return torch.randint(1, rows, (3, 5))


class NextWord(nn.Module):
    """A language model as small as it can be, tied, with a table that starts as usual in Transformers."""

    def __init__(self, rows: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(rows, width), nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(self.norm(x + self.inner(x)))


def test_an_untied_output_layer_is_named_as_what_stays() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(1000, 64), "head": nn.Linear(64, 1000), "other": nn.Linear(64, 64)})
    report = replace_embeddings(model, map_dim=16, expand_dim=64)
    assert report.tables[0].untied == ("head",)
    assert "head: as large as the old table and not tied to it, so it stays as it is" in str(report)
    model["tokens"], model["head"].weight = (table := nn.Embedding(1000, 64)), table.weight
    report = replace_embeddings(model, map_dim=16, expand_dim=64)
    assert report.tables[0].untied == ()


def test_a_tied_replacement_starts_and_learns_as_the_old_table_did() -> None:
    """Logits can start as large as the old while the table, the half that must learn, hardly moves under Adam."""
    chances = 1 / torch.arange(1, 2001)

    def started_and_learnt(replaced: bool) -> tuple[float, float]:
        torch.manual_seed(1)
        model = NextWord()
        if replaced:
            replace_embeddings(model, map_dim=16, expand_dim=64)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        losses = []
        for _ in range(100):
            ids = chances.multinomial(256, replacement=True)  # words follow each other by chance, frequent ones first
            logits = model(ids[:-1])
            losses.append(nn.functional.cross_entropy(logits, ids[1:]))
            if len(losses) == 1:
                size = float(logits.detach().std())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        return size, float(torch.stack(losses[-20:]).mean())

    (old_size, old_loss), (new_size, new_loss) = started_and_learnt(False), started_and_learnt(True)
    assert new_size == pytest.approx(old_size, rel=0.2)
    assert new_loss < old_loss + 0.1


@pytest.mark.parametrize("heads", ["tie", "untie"])
@pytest.mark.parametrize(("std", "expected"), [(0.02, 0.02), (3.0, 3.0), (0.0, 1.0)])
def test_fresh_vectors_start_as_large_as_the_old(heads: Any, std: float, expected: float) -> None:
    model = NextWord()
    nn.init.normal_(model.tokens.weight, std=std)
    report = replace_embeddings(model, map_dim=16, expand_dim=64, heads=heads)
    mapped, finished = sizes_read(model.tokens.table)
    assert finished == pytest.approx(expected, rel=0.1)
    assert mapped == pytest.approx(2 * expected if heads == "tie" else 1.0, rel=0.1)
    assert report.tables[0].initial_rms == pytest.approx(expected, rel=0.05)
    assert f"vectors start with a root mean square of {report.tables[0].initial_rms:.2g}" in str(report)


def test_a_classifier_gets_define_and_learns() -> None:
    model = Classifier()
    report = replace_embeddings(model, **SIZES)
    assert isinstance(model.embedding.table, DeFINE)
    assert (model.embedding.num_embeddings, model.embedding.embedding_dim) == (50, 24)
    assert model.embedding.padding_idx == 0
    assert not model.embedding(torch.tensor([0])).any()
    model(ids_for(50)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert report.parameters_after == sum(p.numel() for p in model.parameters())
    only = report.tables[0]
    assert (only.names, only.parameters_before) == (("embedding",), 50 * 24)
    assert report.parameters_before - report.parameters_after == only.parameters_before - only.parameters_after
    assert only.bytes_after == 4 * (only.parameters_after + 1)
    assert "embedding: 50 × 24, 1,200 →" in str(report)
    assert repr(report) == str(report)
    assert report.to_dict()["tables"][0]["rows"] == 50


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_device_dtype_padding_and_mode_stay(dtype: torch.dtype, training: bool) -> None:
    model = Classifier(padding_idx=None).to(dtype).train(training)
    replace_embeddings(model, **SIZES)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(module.training == training for module in model.modules())
    assert model.embedding.padding_idx is None
    assert model.embedding(ids_for(50)).dtype == dtype


@pytest.mark.gpu
def test_the_device_stays() -> None:
    model = Classifier().cuda()
    report = replace_embeddings(model, **SIZES)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    model(ids_for(50).cuda()).sum().backward()
    model.cpu()
    restore(model, report)
    model(ids_for(50))


def test_on_the_meta_device_nothing_tells_what_a_table_of_another_class_does() -> None:
    model = Tied()
    scaled_by_nobody_knows_what(model)
    with pytest.raises(UserError, match="the meta device does not tell what: replace it where the model has its weig"):
        replace_embeddings(model.to("meta"), targets="encoder.tokens", **SIZES)


def test_meta_models_are_planned_without_memory() -> None:
    with torch.device("meta"):
        model = Tied(rows=1_000_000, width=512)
    report = replace_embeddings(model, targets="encoder.tokens", map_dim=64, expand_dim=512)
    assert report.tables[0].parameters_before == 512_000_000
    assert report.tables[0].parameters_after < 66_000_000


def test_shared_tables_and_heads_are_found_and_stay_shared() -> None:
    model = Tied()
    report = replace_embeddings(model, targets="encoder.tokens", **SIZES)
    assert report.tables[0].names == ("encoder.tokens", "decoder.tokens")
    assert report.tables[0].heads == ("head",)
    assert isinstance(model.encoder["tokens"], StandIn)
    assert isinstance(model.decoder["tokens"], SharedStandIn)
    assert isinstance(model.head, MapHead)
    assert isinstance(model.encoder["positions"], nn.Embedding)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert sum(tensor.shape[0] == 40 and tensor.ndim == 2 for tensor in state.values()) == 1
    twin = Tied()
    replace_embeddings(twin, targets="encoder.tokens", **SIZES)
    twin.load_state_dict(state)
    ids = ids_for(40)
    assert torch.equal(model(ids), twin(ids))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.encoder["tokens"].table.map.table.weight.zero_()
    assert not torch.equal(model.head(torch.ones(1, 12)), copied.head(torch.ones(1, 12)))
    assert torch.equal(copied.head(torch.ones(1, 12))[0], copied.head.bias)


@pytest.mark.parametrize("heads", ["tie", "untie"])
def test_a_lossless_table_leaves_the_model_as_it_was(heads: Any) -> None:
    model = Tied().eval()
    ids = ids_for(40)
    before = model(ids)
    table = dense_table(model.encoder["tokens"].weight.detach(), "float32")
    replace_embeddings(model, table=table, targets="encoder.tokens", heads=heads)
    torch.testing.assert_close(model(ids), before)
    assert isinstance(model.head, VectorsHead if heads == "tie" else nn.Linear)
    cache_tables(model)
    torch.testing.assert_close(model(ids), before)


@pytest.mark.parametrize("learns", [True, False])
def test_an_untied_head_learns_where_the_old_one_did(learns: bool) -> None:
    model = Tied().requires_grad_(learns)
    replace_embeddings(model, targets="encoder.tokens", heads="untie", **SIZES)
    assert model.head.weight.requires_grad == learns


def test_a_large_vocabulary_is_scored_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdefine.adapt.stand_in.TOKENS_AT_ONCE", 7)
    model = Tied().double()
    weight = model.encoder["tokens"].weight.detach().clone()
    table = svd_table(weight, rank=5).double().requires_grad_()
    replace_embeddings(model, table=table, targets="encoder.tokens")
    hidden = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    matrix = table(torch.arange(40))
    wanted = hidden @ matrix.T + model.head.bias
    torch.testing.assert_close(model.head(hidden), wanted)
    ours = torch.autograd.grad(model.head(hidden).square().sum(), [hidden, *table.parameters()])
    theirs = torch.autograd.grad((hidden @ matrix.T + model.head.bias).square().sum(), [hidden, *table.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_head_that_is_tied_to_finished_vectors(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdefine.embedding.table.TOKENS_AT_ONCE", 7)
    model = Tied()
    size = float(model.head.weight.detach().square().mean().sqrt())
    unit = UnitConfig(dropout=dropout)
    replace_embeddings(model, targets="encoder.tokens", heads="finished", unit=unit, **SIZES)
    assert isinstance(model.head, VectorsHead)
    model.double()
    table, hidden = model.encoder["tokens"].table, torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    assert float(table.table().square().mean().sqrt()) == pytest.approx(size, rel=0.3)
    inputs = [hidden, *table.parameters()]
    ours = torch.autograd.grad(model.head(hidden).square().sum(), inputs)
    if dropout:
        assert not torch.equal(model.head(hidden), model.head(hidden))
        model.eval()
    matrix = torch.stack([table(torch.tensor(i)) for i in range(40)])
    wanted = hidden @ matrix.T + model.head.bias
    torch.testing.assert_close(model.head(hidden), wanted, rtol=0, atol=1e-10)
    if not dropout:
        theirs = torch.autograd.grad(wanted.square().sum(), inputs)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    with torch.no_grad():
        table.map.table.weight.mul_(2)
        assert not torch.equal(model.head(hidden), wanted)
        torch.testing.assert_close(model.head(hidden), hidden @ table.table().T + model.head.bias)


class Scaled(nn.Embedding):
    def __init__(self, *sizes: int, factor: float = 3.0) -> None:
        super().__init__(*sizes)
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.factor


def test_a_table_that_scales_its_vectors_goes_on_scaling_them() -> None:
    model = nn.Sequential(Scaled(30, 8), nn.Linear(8, 8))
    before = model(torch.arange(30))
    replace_embeddings(model, table=dense_table(model[0].weight.detach(), "float32"))
    assert model[0].scale == pytest.approx(3.0)
    torch.testing.assert_close(model(torch.arange(30)), before)


@given(
    rows=st.integers(2, 60),
    width=st.integers(1, 20).map(lambda n: 2 * n),
    padding=st.booleans(),
    tied=st.booleans(),
    seed=st.integers(0, 5),
)
def test_replace_and_restore_for_many_shapes(rows: int, width: int, padding: bool, tied: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"table": nn.Embedding(rows, width, 0 if padding else None), "head": nn.Linear(width, rows)})
    if tied:
        model["head"].weight = model["table"].weight
    before = model_hash(model)
    report = replace_embeddings(model, map_dim=4, expand_dim=8, depth=2)
    logits = model["head"](model["table"](torch.arange(rows)))
    assert logits.shape == (rows, rows)
    assert bool(report.tables[0].heads) == tied
    restore(model, report)
    assert model_hash(model) == before


def test_restore_follows_the_model_and_refuses_another() -> None:
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = replace_embeddings(model, targets="encoder.tokens", **SIZES)
    model.to(torch.float64).eval()
    with pytest.raises(UserError, match="another model"):
        restore(Tied(), report)
    restore(model, report)
    assert not model.head.training
    assert model.head.weight is model.encoder["tokens"].weight is model.decoder["tokens"].weight
    assert all(torch.equal(tensor, before[name].double()) for name, tensor in model.state_dict().items())
    with pytest.raises(UserError, match="has changed since"):
        restore(model, report)


@pytest.mark.parametrize("given", [False, True])
def test_replaced_tables_can_be_exported(given: bool) -> None:
    model = Tied().eval()
    table = quantised_table(model.encoder["tokens"].weight.detach(), 4, 12) if given else None
    replace_embeddings(model, targets="encoder.tokens", table=table, **SIZES)
    ids = ids_for(40)
    program = torch.export.export(model, (ids,))
    torch.testing.assert_close(program.module()(ids), model(ids))


def test_resizing_follows_the_embedding() -> None:
    model = Tied().eval()
    replace_embeddings(model, targets="encoder.tokens", **SIZES)
    ids = ids_for(40)
    before = model(ids)
    model.encoder["tokens"].resize(45)
    model.head.follow_resize()
    after = model(ids)
    assert after.shape[-1] == 45
    torch.testing.assert_close(after[..., :40], before)


TARGETS: list[Any] = [
    "encoder.tokens",
    "encoder.t*",
    re.compile(r"encoder\.tok.*"),
    ["encoder.tokens"],
    "decoder.tokens",
]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_names_patterns_and_lists_mean_the_same_table(targets: Any) -> None:
    model = Tied()
    other = copy.deepcopy(model)
    report = replace_embeddings(model, targets=targets, **SIZES)
    assert [table.names for table in report.tables] == [("encoder.tokens", "decoder.tokens")]
    assert replace_embeddings(other, targets, **SIZES).tables == report.tables


def test_a_type_means_all_of_its_kind() -> None:
    model = Tied()
    report = replace_embeddings(model, targets=nn.Embedding, **SIZES)
    assert {table.names[0] for table in report.tables} == {"encoder.tokens", "encoder.positions"}


def quantised(model: Tied) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    config = torchao.Int8WeightOnlyConfig()
    stand_by = nn.ModuleDict({"x": nn.Linear(12, 40, bias=False)})
    torchao.quantize_(stand_by, config)
    model.encoder["tokens"].weight = stand_by["x"].weight


def small_numbers(model: Tied) -> None:
    weight = nn.Parameter(torch.zeros(40, 12, dtype=torch.int8), requires_grad=False)
    model.encoder["tokens"].weight = weight


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 12))
        self.vocab_start_index = 0


def vocabulary_parallel(model: Tied) -> None:
    model.encoder["tokens"] = VocabParallelEmbedding()


def spread_over_processes(model: Tied) -> None:
    """A table as tensor parallelism leaves it, on a mesh of one process."""
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model.encoder["tokens"].weight = nn.Parameter(distribute_tensor(torch.zeros(40, 12), mesh, [Shard(0)]))
    finally:
        destroy_process_group()


def tied_by_a_view(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.encoder["tokens"].weight.data)


class OwnHead(nn.Module):
    def __init__(self, matrix: nn.Parameter) -> None:
        super().__init__()
        self.matrix = matrix


def tied_to_something_else(model: Tied) -> None:
    model.head = OwnHead(model.encoder["tokens"].weight)


class Noisy(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1.0


def more_than_a_lookup(model: Tied) -> None:
    model.encoder["tokens"] = Noisy(40, 12)


def hooked(model: Tied) -> None:
    model.encoder["tokens"].register_forward_hook(lambda *arguments: None)


def hooked_backwards(model: Tied) -> None:
    model.encoder["tokens"].register_full_backward_pre_hook(lambda *arguments: None)


def hooked_weight(model: Tied) -> None:
    model.encoder["tokens"].weight.register_hook(lambda gradient: gradient * 0)


def hooked_head(model: Tied) -> None:
    model.head.register_forward_pre_hook(lambda *arguments: None)


def another_forward(model: Tied) -> None:
    """As accelerate does it, to move what goes in and out between devices."""
    plain = model.encoder["tokens"].forward
    model.encoder["tokens"].forward = lambda ids: plain(ids) + 1.0


def another_forward_of_the_head(model: Tied) -> None:
    model.head.forward = lambda hidden: hidden


class Dropping(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(ids), 0.5, self.training)


def dropping_in_training(model: Tied) -> None:
    model.encoder["tokens"] = Dropping(40, 12)
    model.eval()


class Decoupled(nn.Embedding):
    """Ids above the table's are looked up in another one, as in some models of images and text."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.more = nn.Embedding(4, width)

    def forward(self, ids: Tensor) -> Tensor:
        inside = ids < self.num_embeddings
        above = self.more((ids - self.num_embeddings).clamp_min(0))
        return torch.where(inside.unsqueeze(-1), super().forward(ids.clamp_max(self.num_embeddings - 1)), above)


def two_tables_in_one(model: Tied) -> None:
    model.encoder["tokens"] = Decoupled(40, 12)


class Tripled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


def scaled_by_nobody_knows_what(model: Tied) -> None:
    model.encoder["tokens"] = Tripled(40, 12)
    nn.init.zeros_(model.encoder["tokens"].weight)


def with_max_norm(model: Tied) -> None:
    model.encoder["tokens"].max_norm = 1.0


def parametrised(model: Tied) -> None:
    nn.utils.parametrizations.weight_norm(model.encoder["tokens"])


def tied_to_a_bag(model: Tied) -> None:
    model.encoder["tokens"] = nn.EmbeddingBag(40, 12)
    model.encoder["tokens"].weight = model.head.weight


def sparse_and_tied(model: Tied) -> None:
    model.encoder["tokens"].sparse = True


def not_finite(model: Tied) -> None:
    with torch.no_grad():
        model.encoder["tokens"].weight[3, 2] = torch.nan


def replaced_before(model: Tied) -> None:
    replace_embeddings(model, targets="encoder.tokens", **SIZES)


REFUSED: list[tuple[Callable[[Tied], None], str]] = [
    (quantised, "is quantised"),
    (small_numbers, r"is quantised \(int8"),
    (vocabulary_parallel, "is split over several processes"),
    (spread_over_processes, r"is split over several processes \(DTensor"),
    (tied_by_a_view, r"shares its memory with head\.weight in a way that is not understood"),
    (tied_to_something_else, r"shares its memory with head\.matrix in a way that is not understood"),
    (more_than_a_lookup, "does more than look rows up"),
    (hooked, "has hooks"),
    (hooked_backwards, "has hooks"),
    (hooked_weight, "has hooks"),
    (hooked_head, "is shared by head, which has hooks"),
    (another_forward, "has a forward that was put on it"),
    (another_forward_of_the_head, "is shared by head, which has a forward that was put on it"),
    (dropping_in_training, "does more than look rows up"),
    (two_tables_in_one, r"has more than a table in it \(Decoupled"),
    (scaled_by_nobody_knows_what, "does more than look rows up"),
    (with_max_norm, "max_norm"),
    (parametrised, "has no plain weight"),
    (tied_to_a_bag, r"is an EmbeddingBag's and stands in several places \(encoder\.tokens, decoder\.tokens, head\)"),
    (sparse_and_tied, r"has sparse gradients, but dense ones from head, which shares it"),
    (not_finite, r"The table encoder\.tokens has values that are not finite"),
    (replaced_before, "was replaced already"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[change.__name__ for change, _ in REFUSED])
def test_tables_that_are_not_understood_are_refused(change: Callable[[Tied], None], words: str) -> None:
    model = Tied()
    change(model)
    before = model_hash(model)
    with pytest.raises(UserError, match=words) as refusal:
        replace_embeddings(model, targets="encoder.tokens", **SIZES)
    assert "\n" not in str(refusal.value)
    assert model_hash(model) == before
    listed = "; ".join(table.described() for table in survey(model))
    assert "encoder.positions (16 × 12" in listed


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("nothing", "matches no table"),
        ("encoder.token", r"did you mean 'encoder\.tokens'"),
        ("tables.*", "matches no table"),
        (re.compile("x.*"), "matches no table"),
        (nn.Bilinear, "matches no table"),
        (["encoder.tokens", "missing"], "'missing' matches no table"),
        ("words", "is the end of several names"),
        (None, "has several tables, and none is named"),
        ([], "an empty list"),
    ],
)
def test_targets_that_do_not_fit_are_refused_with_the_list(targets: Any, words: str) -> None:
    model = Tied()
    model.left = nn.ModuleDict({"words": nn.Embedding(5, 4)})
    model.right = nn.ModuleDict({"words": nn.Embedding(5, 4)})
    before = model_hash(model)
    with pytest.raises(UserError, match=words) as refusal:
        replace_embeddings(model, targets=targets, **SIZES)
    found = "encoder.tokens (40 × 12, also at decoder.tokens, tied to head); encoder.positions (16 × 12)"
    assert found in str(refusal.value)
    assert model_hash(model) == before


def refusal_of(model: nn.Module, **options: Any) -> str:
    before = model_hash(model)
    with pytest.raises(UserError) as refusal:
        replace_embeddings(model, **options)
    assert model_hash(model) == before
    return str(refusal.value)


def test_what_a_refusal_says() -> None:
    """Whole sentences, to whoever gave targets and to whoever gave none."""
    model = nn.ModuleDict({"a": nn.Embedding(9, 8), "b": nn.Embedding(5, 8)})
    assert refusal_of(model) == (
        "The model has several tables, and none is named: name the table by targets=…; "
        "the model has a (9 × 8); b (5 × 8)."
    )
    assert refusal_of(model, targets="c") == ("The target 'c' matches no table: the model has a (9 × 8); b (5 × 8).")
    assert refusal_of(model, targets=nn.Bilinear) == (
        "The target 'Bilinear' matches no table: the model has a (9 × 8); b (5 × 8)."
    )
    assert refusal_of(model, targets=[]) == (
        "The targets are an empty list: name the table by targets=…; the model has a (9 × 8); b (5 × 8)."
    )
    model["b"].max_norm = 1.0
    reason = "uses max_norm or scale_grad_by_freq, which a replacement does not have"
    assert refusal_of(model, targets="b") == (
        f"The table b {reason}, so it cannot be replaced: name others with targets=…; "
        f"the model has a (9 × 8); b (5 × 8; {reason})."
    )
    assert refusal_of(nn.ModuleDict({"b": model["b"]})) == f"The table b {reason}, so it cannot be replaced."
    given = {"c": DeFINE(9, 8, 4, 8, 2)}
    assert refusal_of(model, targets="a", table=given) == (
        "A table was given for c, which is not to be replaced: give one for a."
    )
    assert refusal_of(model, targets="a", table={}) == "No table was given for a: add it to the mapping."


def test_a_name_that_is_nearly_right_or_means_two_tables() -> None:
    model = nn.ModuleDict({"left": nn.ModuleDict({"words": nn.Embedding(5, 4)})})
    assert refusal_of(model, targets="left.word") == (
        "The target 'left.word' matches no table: did you mean 'left.words'; the model has left.words (5 × 4)."
    )
    model["right"] = nn.ModuleDict({"words": nn.Embedding(5, 4)})
    assert refusal_of(model, targets="words") == (
        "The target 'words' is the end of several names: write one of them in full; the model has left.words (5 × 4); "
        "right.words (5 × 4)."
    )


def test_a_table_that_was_replaced_already() -> None:
    model = nn.ModuleDict({"emb": DeFINE(9, 8, 4, 8, 2)})
    assert refusal_of(model) == "The table emb is a DeFINE already, so there is nothing to replace."
    model = nn.ModuleDict({"emb": nn.Embedding(9, 8)})
    replace_embeddings(model, **SIZES)
    for targets in (None, "emb"):
        assert refusal_of(model, targets=targets) == (
            "The table emb was replaced already: go on with it as it is, or call restore(model, report) before you "
            "replace it again."
        )
    model["more"] = nn.Embedding(5, 8)
    assert refusal_of(model, targets="c") == (
        "The target 'c' matches no table: the model has emb (9 × 8; was replaced already); more (5 × 8)."
    )


def test_one_bad_table_among_many_stops_everything() -> None:
    model = nn.ModuleDict({"good": nn.Embedding(9, 8), "bad": nn.Embedding(9, 8)})
    model["bad"].max_norm = 1.0
    before = model_hash(model)
    with pytest.raises(UserError, match="The table bad uses max_norm"):
        replace_embeddings(model, targets=["good", "bad"], **SIZES)
    with pytest.raises(UserError, match="map_dim 7"):
        replace_embeddings(model, targets="good", map_dim=7, expand_dim=16, unit="glt")
    with pytest.raises(UserError, match="heads is 'maybe'"):
        replace_embeddings(model, targets="good", heads="maybe")  # type: ignore[arg-type]
    assert model_hash(model) == before


def test_a_model_without_tables() -> None:
    with pytest.raises(UserError, match=r"no nn\.Embedding was found"):
        replace_embeddings(nn.Linear(2, 2))


def test_bad_tables_are_refused() -> None:
    model = Classifier()
    before = model_hash(model)
    for table, words in (
        (nn.Embedding(50, 24), "is a Embedding: give a CompactTable"),
        (DeFINE(50, 20, 8, 16), r"is 50 × 20, but the model's is 50 × 24"),
        (DeFINE(50, 24, 8, 16, padding_idx=3), "has the padding row 3"),
    ):
        with pytest.raises(UserError, match=words):
            replace_embeddings(model, table=table)
    assert model_hash(model) == before


def test_an_adaptive_map_cannot_be_tied_to() -> None:
    from torchdefine import AdaptiveMap

    model = Tied()
    replace_embeddings(
        model, table=DeFINE.over(AdaptiveMap(40, 8, (10,)), 12, expand_dim=16), targets="encoder.tokens", heads="untie"
    )
    assert isinstance(model.head, nn.Linear)


def test_a_narrow_table_shrinks_without_a_word() -> None:
    model = nn.Sequential(nn.Embedding(20_000, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = replace_embeddings(model)
    assert report.parameters_after < report.parameters_before / 2


def test_a_model_that_is_a_table_is_told_so() -> None:
    with pytest.raises(UserError, match=r"itself a table.*use DeFINE"):
        replace_embeddings(nn.Embedding(50, 8))


def test_a_sparse_table_gets_a_sparse_map() -> None:
    model = nn.ModuleDict({"ids": nn.Embedding(90, 12, sparse=True)})
    report = replace_embeddings(model, **SIZES)
    assert model["ids"].sparse
    model["ids"](torch.tensor([3, 3, 5])).sum().backward()
    gradient = model["ids"].table.map.table.weight.grad
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[3, 5]]
    restore(model, report)
    assert type(model["ids"]) is nn.Embedding


def test_an_embedding_bag_is_replaced_cached_and_restored() -> None:
    model = nn.ModuleDict({"ids": nn.EmbeddingBag(90, 12, mode="sum", include_last_offset=True, padding_idx=1)})
    given = torch.tensor([3, 1, 3, 5]), torch.tensor([0, 2, 4])
    old, before = model["ids"], model["ids"](*given)
    report = replace_embeddings(model, **SIZES)
    new = model["ids"]
    assert (type(new), new.mode, new.include_last_offset, new.padding_idx) == (DeFINEBag, "sum", True, 1)
    assert report.tables[0].parameters_after == sum(p.numel() for p in new.parameters())
    found = new(*given)
    assert 0.2 < float(found.detach().std() / before.detach().std()) < 5
    torch.testing.assert_close(new.embedding.cached()(torch.tensor([3])), found[:1].detach())
    assert cache_tables(model) == ["ids"]
    torch.testing.assert_close(model["ids"](*given), found)
    assert refusal_of(model) == "The table ids is a DeFINEBag already, so there is nothing to replace."
    restore(model, report)
    assert model["ids"] is old
    assert torch.equal(model["ids"](*given), before)


def test_rare_words_may_share_ngrams_in_a_replaced_table() -> None:
    model, words = NextWord(), [f"word{number}" for number in range(2000)]
    features = ["characters:500x16:concat", "frequency:16x16"]
    report = replace_embeddings(model, map_dim=16, expand_dim=64, features=features, tokens=words)
    mapped, finished = sizes_read(model.tokens.table)
    assert (mapped, finished) == (pytest.approx(0.04, rel=0.2), pytest.approx(0.02, rel=0.2))
    assert model(torch.tensor([[1, 2]])).isfinite().all()
    model.eval().tokens.cache()
    torch.testing.assert_close(model.tokens(torch.tensor([7])), model.tokens.table(torch.tensor([7])))
    restore(model, report)
    for wrong, sentence in ((["bigrams:64x8"], "calls its table with ids alone"), (features, "give them as tokens")):
        with pytest.raises(UserError, match=sentence):
            replace_embeddings(model, map_dim=16, expand_dim=64, features=wrong)
