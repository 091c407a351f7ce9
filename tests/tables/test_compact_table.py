"""One behaviour suite over every way of packing a table."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from torchdefine.config import Config
from torchdefine.embedding import DeFINE, MLPConfig, UnitConfig
from torchdefine.errors import UserError
from torchdefine.sealed_tensors import write_safetensors
from torchdefine.tables import (
    CodeLearning,
    CompactTable,
    DenseRows,
    coded_table,
    dense_table,
    load_table,
    quantised_table,
    svd_table,
    transform_table,
)
from torchdefine.tables.fitted_unit import UnitRows
from torchdefine.tables.quantised import quantise_rows
from torchdefine.tables.rows import in_bands, sorted_within

V, M = 90, 24
IDS = torch.tensor([[0, 1, 2, 89], [30, 10, 9, 2]])


def matrix() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(V, 12, generator=generator) @ torch.randn(12, M, generator=generator) + 0.3


COUNTS = torch.arange(V).flip(0).float() ** 2 % 101


def unit_table(unit: Config) -> CompactTable:
    return CompactTable(UnitRows(DenseRows.of(matrix()[:, :8]), unit), torch.ones(M))


TABLES = {
    "float16": lambda: dense_table(matrix()),
    "int8": lambda: quantised_table(matrix(), 8),
    "int4": lambda: quantised_table(matrix(), 4, 8),
    "int3": lambda: quantised_table(matrix(), 3, 7),
    "int1": lambda: quantised_table(matrix(), 1),
    "svd": lambda: svd_table(matrix(), 6, counts=COUNTS),
    "svd int4": lambda: svd_table(matrix(), 6, storage="int4"),
    "frequent rows": lambda: svd_table(matrix(), 5, 11, counts=COUNTS),
    "frequent rows int4": lambda: svd_table(matrix(), 5, 11, counts=COUNTS, storage="int4"),
    "codes": lambda: coded_table(matrix(), 4, 4, learning=CodeLearning(steps=20, rounds=2)),
    "bits by importance": lambda: transform_table(matrix(), 3_000, counts=COUNTS, padding_idx=None),
    "ranks by frequency": lambda: transform_table(matrix(), 6_000, counts=COUNTS, storage="float32"),
    "define": lambda: unit_table(UnitConfig(embedding_dim=M, expand_dim=16, depth=2)),
    "mlp": lambda: unit_table(MLPConfig(embedding_dim=M, expand_dim=16)),
}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> CompactTable:
    return TABLES[request.param]()


def test_looks_like_nn_embedding(table: CompactTable) -> None:
    assert (table.num_embeddings, table.embedding_dim, table.padding_idx) == (V, M, None)
    assert table(IDS).shape == (2, 4, M)
    assert table(torch.tensor(3)).shape == (M,)
    assert table(torch.zeros(0, dtype=torch.long)).shape == (0, M)
    assert table(IDS).dtype == torch.float32
    assert torch.equal(table(IDS.to(torch.uint8)), table(IDS))
    with pytest.raises(UserError, match="outside the vocabulary"):
        table(torch.tensor([V]))


def test_each_token_is_decoded_alone(table: CompactTable) -> None:
    every = table(torch.arange(V))
    torch.testing.assert_close(every[IDS], table(IDS), rtol=1e-6, atol=1e-6)


def test_the_file_is_as_large_as_the_table_says(table: CompactTable, tmp_path) -> None:
    path = tmp_path / "table.safetensors"
    table.save(path, {"vocabulary": "abc"})
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert path.stat().st_size == header + table.stored_bytes
    assert header < 4096


def test_save_and_load_are_bit_equal(table: CompactTable, tmp_path) -> None:
    table.padding_idx = 2
    table.save(tmp_path / "table.safetensors")
    loaded = load_table(tmp_path / "table.safetensors")
    assert torch.equal(loaded(IDS), table(IDS))
    assert not loaded(IDS)[IDS == 2].any()
    assert loaded.to_config() == table.to_config()
    assert loaded.num_values == table.num_values
    assert all(
        a.dtype == b.dtype for a, b in zip(loaded.state_dict().values(), table.state_dict().values(), strict=True)
    )
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_config_rebuilds_the_module_for_a_state(table: CompactTable) -> None:
    rebuilt = CompactTable.from_config(json.loads(json.dumps(table.to_config())))
    rebuilt.load_state_dict(table.state_dict())
    assert torch.equal(rebuilt(IDS), table(IDS))
    assert torch.equal(copy.deepcopy(table)(IDS), table(IDS))


def test_gives_the_dtype_of_the_model(table: CompactTable) -> None:
    exact = table(IDS)
    low = table.to(torch.bfloat16)(IDS)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, rtol=0.1, atol=0.15)


def test_works_under_autocast(table: CompactTable) -> None:
    expected = table(IDS)
    with torch.autocast("cpu", torch.float16):
        vectors = table(IDS)
    assert vectors.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(vectors, expected, atol=2e-2, rtol=2e-2)


def test_float_parts_learn_when_asked(table: CompactTable) -> None:
    table.float().requires_grad_(True)
    table(IDS).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in table.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    assert torch.isfinite(torch.cat([gradient.flatten() for gradient in gradients.values()])).all()
    expected = 2 * table(IDS).sum((0, 1))
    torch.testing.assert_close(gradients["mean"], expected)


def test_exports_with_dynamic_batch_and_length(table: CompactTable) -> None:
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=64)
    program = torch.export.export(table, (IDS,), dynamic_shapes=({0: batch, 1: length},), strict=False)
    for shape in ((2, 4), (3, 7), (1, 5)):
        ids = torch.randint(0, V, shape)
        torch.testing.assert_close(program.module()(ids), table(ids), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int3", "codes", "frequent rows int4", "bits by importance", "define"])
def test_onnx_agrees(kind: str, tmp_path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    table = TABLES[kind]()
    shapes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=64)}
    program = torch.onnx.export(table, (IDS,), dynamo=True, dynamic_shapes=(shapes,), verbose=False)
    assert program is not None
    program.save(str(tmp_path / "table.onnx"))
    session = runtime.InferenceSession(str(tmp_path / "table.onnx"))
    for shape in ((2, 4), (3, 7)):
        ids = torch.randint(0, V, shape)
        (vectors,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(vectors), table(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiles(table: CompactTable) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(table, dynamic=True, fullgraph=True)
    for shape in ((2, 4), (3, 7)):
        ids = torch.randint(0, V, shape)
        torch.testing.assert_close(compiled(ids), table(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_gives_the_same_on_a_gpu(table: CompactTable) -> None:
    torch.testing.assert_close(copy.deepcopy(table).cuda()(IDS.cuda()).cpu(), table(IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "build",
    [
        lambda x: quantised_table(x, 4),
        lambda x: svd_table(x, 6, counts=COUNTS),
        lambda x: transform_table(x, 3_000, counts=COUNTS),
        lambda x: coded_table(x, 4, 4, learning=CodeLearning(steps=20, rounds=2)),
    ],
)
def test_is_built_where_the_table_is(build) -> None:
    table = build(matrix().cuda())
    assert {tensor.device.type for tensor in table.state_dict().values()} == {"cuda"}
    # What is searched for with rounding in the way may be found elsewhere there, but must be as good.
    everything = torch.arange(V)
    lost_there = (table(everything.cuda()).cpu() - matrix()).square().mean()
    lost_here = (build(matrix())(everything) - matrix()).square().mean()
    torch.testing.assert_close(lost_there, lost_here, rtol=0.3, atol=1e-3)


def test_padding_is_zero_and_learns_nothing() -> None:
    table = svd_table(matrix(), 6, padding_idx=-1).requires_grad_(True)
    assert table.padding_idx == V - 1
    vectors = table(torch.tensor([V - 1, 0]))
    assert not vectors[0].any()
    vectors[0].sum().backward()
    assert not table.mean.grad.any()


def test_a_cut_file_is_refused(tmp_path) -> None:
    path = tmp_path / "table.safetensors"
    quantised_table(matrix()).save(path)
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="damaged or cut short"):
            load_table(path)


def test_a_flipped_bit_is_refused(tmp_path) -> None:
    path = tmp_path / "table.safetensors"
    quantised_table(matrix()).save(path, {"vocabulary": "abc"})
    whole = path.read_bytes()
    for at in range(8, len(whole), len(whole) // 60):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(UserError):
            load_table(path)


def test_foreign_files_are_refused(tmp_path) -> None:
    path = tmp_path / "table.safetensors"
    save_file({"weight": matrix()}, path)
    with pytest.raises(UserError, match="not a torchdefine compact table"):
        load_table(path)
    with pytest.raises(UserError, match="does not exist"):
        load_table(tmp_path / "none.safetensors")


def test_a_file_of_another_version_or_shape_is_refused(tmp_path) -> None:
    path = tmp_path / "table.safetensors"
    table = quantised_table(matrix())
    table.save(path)
    tensors = load_file(path)
    config = table.to_config()
    with safe_open(path, "pt") as file:
        header = file.metadata()
    later = header | {"config": json.dumps(config | {"version": 99})}
    write_safetensors(path, tensors, later)
    with pytest.raises(UserError, match="version 99"):
        load_table(path)
    config["rows"]["num_rows"] += 1
    write_safetensors(path, tensors, later | {"config": json.dumps(config)})
    with pytest.raises(UserError, match="damaged"):
        load_table(path)
    config["rows"] = {"encoding": "magic"}
    write_safetensors(path, tensors, later | {"config": json.dumps(config)})
    with pytest.raises(UserError, match="'magic' is unknown"):
        load_table(path)


def test_a_table_of_another_vocabulary_is_refused(tmp_path) -> None:
    path = tmp_path / "table.safetensors"
    quantised_table(matrix()).save(path, {"vocabulary": "abc"})
    assert load_table(path, {"vocabulary": "abc"}).num_embeddings == V
    with pytest.raises(UserError, match="was made for vocabulary 'abc', not 'xyz'"):
        load_table(path, {"vocabulary": "xyz"})


def test_any_embedding_can_be_packed() -> None:
    embedding = DeFINE(50, 24, 16, 32, padding_idx=3)
    table = quantised_table(embedding, 8, padding_idx=3)
    torch.testing.assert_close(table(torch.arange(50)), embedding(torch.arange(50)), rtol=0.05, atol=0.02)
    standard = nn.Embedding(50, 24)
    torch.testing.assert_close(quantised_table(standard, 8)(IDS % 50), standard(IDS % 50), rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: svd_table(matrix(), 25), "rank 25"),
        (lambda: svd_table(matrix(), 5, counts=[1, 2]), "2 counts for 90 rows"),
        (lambda: svd_table(matrix(), 5, counts=-COUNTS - 1), "negative"),
        (lambda: svd_table(matrix(), 5, storage="int9"), "'int9'"),
        (lambda: dense_table(matrix(), "float8"), "'float8'"),
        (lambda: quantised_table(matrix() * float("nan")), "not finite"),
        (lambda: quantised_table(matrix()[0]), "shape"),
        (lambda: quantised_table(matrix(), 9), "9 bits"),
        (lambda: svd_table(matrix(), 5, 90, counts=COUNTS), "90 rows of 90"),
        (lambda: coded_table(matrix(), 6, 12), "power of two"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(wrong, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        wrong()
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    "build",
    [
        dense_table,
        quantised_table,
        lambda table: svd_table(table, 4, storage="int8"),
        lambda table: transform_table(table, 3000, counts=torch.ones(V)),
    ],
)
def test_numbers_that_float16_cannot_hold_are_refused(build) -> None:
    with pytest.raises(UserError, match="which float16 cannot hold"):
        build(matrix() * 1e9)
    assert torch.isfinite(svd_table(matrix() * 1e9, 4)(IDS)).all()


@pytest.mark.parametrize("value", [0.0, 3.0])
@pytest.mark.parametrize("storage", ["mixed", "int8", "float32"])
def test_a_table_of_equal_rows_can_be_packed(value: float, storage: str) -> None:
    table = transform_table(torch.full((V, M), value), 3000, counts=torch.ones(V), storage=storage)
    torch.testing.assert_close(table(IDS), torch.full((*IDS.shape, M), value))


def test_bands_may_be_narrower_than_the_table() -> None:
    x = matrix()
    order = sorted_within(torch.randperm(V), [20, V - 20])
    bands = [quantise_rows(x[order[:20]], 8), DenseRows.of(x[order[20:], :5])]
    table = CompactTable(in_bands(bands, order))
    for place, row in enumerate(order.tolist()):
        expected = bands[0].matrix()[place] if place < 20 else torch.cat((x[row, :5], torch.zeros(M - 5)))
        assert torch.equal(table(torch.tensor(row)), expected)


def test_places_of_large_vocabularies_are_right() -> None:
    for rows in (40_000, 70_000):
        order = sorted_within(torch.randperm(rows), [100, rows - 100])
        x = torch.arange(rows).float().unsqueeze(1)
        banded = in_bands([DenseRows.of(x[order[:100]]), DenseRows.of(x[order[100:]])], order)
        assert torch.equal(banded.matrix(), x)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_logits_are_products_with_all_vectors(kind: str, padding_idx: int | None) -> None:
    """Values and gradients, in float64."""
    table = TABLES[kind]().double()
    table.padding_idx = padding_idx
    hidden = torch.randn(2, 3, M, dtype=torch.float64, requires_grad=True)
    wanted = hidden @ table(torch.arange(V)).T
    torch.testing.assert_close(table.logits(hidden), wanted, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(wanted)
    given, expected = (torch.autograd.grad((one * direction).sum(), hidden) for one in (table.logits(hidden), wanted))
    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10)
