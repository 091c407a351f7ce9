"""Trellis-coded rows: decoded as a naive loop does, encoded as well as an exhaustive search, as good as counted on."""

import copy
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchdefine.ops import plain_torch
from torchdefine.tables import trellis, trellis_search
from torchdefine.tables.trellis import BITS, BOOKS, MEMORIES, Runs, TrellisRows, codebooks, losses, memory_for
from torchdefine.tables.trellis_search import Encoder, trellis_rows

RUNS = [[5, 3], [3, 1], [1, 6]]
HALVES = [[2.5, 16], [1, 8], [0.5, 32]]
SHORT = [[0.5, 16]]


def naive_row(rows: TrellisRows, row: int) -> list[float]:
    """One row from its bytes, bit by bit."""
    string = 3 * "".join(f"{int(byte):08b}" for byte in rows.codes[row])
    books = codebooks(rows.memory, torch.device("cpu")).view(BOOKS, -1)
    at, numbers = 0, []
    for bits, columns in rows.runs:
        first_book = round(sum(2 if smaller % 1 else 1 for smaller in BITS if smaller < bits))
        together = 2 if bits % 1 else 1
        for _ in range(columns // together):
            window = int(string[at : at + rows.memory], 2)
            for book in books[first_book : first_book + together]:
                numbers.append(float(book[window] * rows.scales[len(numbers)].float()))
            at += round(bits * together)
    return numbers


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("runs", [RUNS, HALVES, SHORT])
def test_decoding_matches_a_naive_loop(memory: int, runs: Runs) -> None:
    width = sum(int(columns) for _, columns in runs)
    rows = trellis_rows(torch.randn(9, width) * torch.logspace(0, -1, width), runs, memory)
    assert 8 * rows.codes.shape[1] == sum(bits * columns for bits, columns in runs)
    given = rows(torch.tensor([[0, 8], [3, 3]]), torch.float32)
    for place, row in (((0, 0), 0), ((0, 1), 8), ((1, 1), 3)):
        assert given[place].tolist() == pytest.approx(naive_row(rows, row), abs=1e-6)
    with plain_torch():
        assert torch.equal(rows(torch.tensor([[0, 8], [3, 3]]), torch.float32), given)


def test_a_row_of_a_few_bits_gets_the_best_of_all_strings() -> None:
    x = torch.randn(30, 16)
    rows = trellis_rows(x, SHORT, 12)
    every = TrellisRows(256, SHORT, 12)
    every.codes, every.scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1), rows.scales
    distances = torch.cdist(x, every.matrix())
    reached = (x - rows.matrix()).norm(dim=-1)
    assert float(reached.sum()) < 1.01 * float(distances.min(1).values.sum())  # the scales came after


@pytest.mark.parametrize("runs", [[[2, 4], [1, 8]], [[1.5, 8], [1, 4]], [[3, 2], [0.5, 16], [2, 1]]])
def test_the_encoder_finds_the_best_string_with_its_first_window(runs: Runs) -> None:
    """All strings of sixteen bits are decoded. Few are nearer, and none of those that begin alike."""
    width = sum(int(columns) for _, columns in runs)
    x, weights = torch.randn(width, 30), torch.ones(width)
    weights[: int(runs[0][1])] = 10
    encoder = Encoder(runs, 8, codebooks(8, torch.device("cpu")).view(BOOKS, -1), weights)
    windows = encoder.windows(x)
    every = TrellisRows(1 << 16, runs, 8)
    every.codes = torch.arange(1 << 16).unsqueeze(1).to(torch.int32).view(torch.uint8)[:, :2].flip(1).contiguous()
    every.scales.data = torch.ones(width)
    roots, matrix, values = weights.sqrt(), every.matrix(), encoder.values(windows)
    high, low = encoder.packed(windows).long().unbind(1)
    assert torch.equal(matrix[256 * high + low], values.T)
    reached = ((x - values).T * roots).norm(dim=-1)
    distances = torch.cdist(x.T * roots, matrix * roots).view(30, 256, 256)  # by the first eight bits
    best = distances[torch.arange(30), high].min(-1).values
    torch.testing.assert_close(reached, best, rtol=1e-3, atol=1e-3)
    assert float(reached.sum()) < 1.25 * float(distances.flatten(1).min(1).values.sum())


@pytest.mark.parametrize(("memory", "bits"), [*itertools.product([8], BITS), (10, 1.5), (12, 2)])
def test_the_loss_is_what_the_allocation_counts_on(memory: int, bits: float) -> None:
    x = torch.randn(600, 64, generator=torch.Generator().manual_seed(int(bits))) * 3
    error = (trellis_rows(x, [[bits, 64]], memory).matrix() - x).square().mean() / x.square().mean()
    assert float(error) == pytest.approx(losses(memory)[BITS.index(bits)], rel=0.05)


def test_more_memory_loses_less() -> None:
    for more, less in itertools.pairwise(MEMORIES):
        assert all(one < other for one, other in zip(losses(more), losses(less), strict=True))
    assert [memory_for(numbers) for numbers in (1, 1 << 24, 1 << 25, 1 << 29)] == [12, 12, 10, 8]


def test_every_column_has_the_scale_that_loses_least() -> None:
    x = torch.randn(300, 16).exp()  # far from normal
    rows = trellis_rows(x, [[1, 16]], 8)
    found = rows.matrix()
    best = (found * x).sum(0) / found.square().sum(0)
    torch.testing.assert_close(best, torch.ones(16), rtol=1e-3, atol=1e-3)


def test_rows_together_do_not_change_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 16)
    whole = trellis_rows(x, [[3, 8], [1, 8]], 8)
    monkeypatch.setattr(trellis_search, "rows_together", lambda memory: 7)
    assert torch.equal(trellis_rows(x, [[3, 8], [1, 8]], 8).codes, whole.codes)


def test_the_codebooks_are_no_part_of_a_module() -> None:
    rows = trellis_rows(torch.randn(20, 16), [[2, 16]], 8)
    assert sorted(rows.state_dict()) == ["codes", "scales"]
    expected = rows.matrix()
    assert torch.equal(copy.deepcopy(rows).double().float().matrix(), expected)
    trellis._codebooks.cache_clear()
    with FakeTensorMode(), torch.device("meta"):
        assert type(codebooks(8, torch.device("cpu"))) is torch.Tensor
    assert torch.equal(rows.matrix(), expected)


@pytest.mark.slow
def test_compiled_and_exported_rows_are_the_same() -> None:
    class Looking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = trellis_rows(torch.randn(20, 32), [[2, 16], [0.5, 16]], 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.rows(ids, torch.float32)

    module, ids = Looking(), torch.tensor([[3, 4, 4], [19, 0, 1]])
    for cleared in (True, False):
        if cleared:
            trellis._codebooks.cache_clear()
        torch._dynamo.reset()
        made = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(made(ids), module(ids))
    exported = torch.export.export(module, (ids,), dynamic_shapes=((torch.export.Dim.DYNAMIC, 3),))
    torch.testing.assert_close(exported.module()(ids[:1]), module(ids[:1]))
