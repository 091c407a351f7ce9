import pytest
import torch

from torchdefine.errors import UserError
from torchdefine.tables import CodeLearning, coded_table
from torchdefine.tables.codes import CodedRows, best_entries, learn_code_rows, refine_codes


def clustered(rows: int = 600, width: int = 32) -> torch.Tensor:
    """Rows with structure that codes can find: sums of a few shared directions, and noise."""
    generator = torch.Generator().manual_seed(3)
    directions = torch.randn(24, width, generator=generator)
    chosen = torch.randint(0, 24, (rows, 3), generator=generator)
    return directions[chosen].sum(1) + 0.3 * torch.randn(rows, width, generator=generator)


def error(rows: CodedRows, x: torch.Tensor) -> float:
    return float((rows.matrix() - x).square().mean())


@pytest.mark.parametrize(("books", "entries"), [(5, 16), (1, 8), (3, 256), (1, 2)])
def test_decoding_matches_a_naive_loop(books: int, entries: int) -> None:
    codes = torch.randint(0, entries, (7, books))
    vectors = torch.randn(books, entries, 12)
    rows = CodedRows.of(codes, vectors, "float32")
    for row in range(7):
        summed = sum(vectors[book, codes[row, book]] for book in range(books))
        torch.testing.assert_close(rows(torch.tensor(row), torch.float32), summed)
    assert torch.equal(rows.unpacked(), codes)


def test_the_papers_table_takes_five_megabytes() -> None:
    rows = CodedRows(267_735, 384, books=32, entries=16, dtype="float32")
    stored = sum(t.numel() * t.element_size() for t in rows.state_dict().values())
    assert round(stored / 1e6, 2) == 5.07


def test_the_entries_solve_the_least_squares_problem() -> None:
    x, codes = clustered(), torch.randint(0, 4, (600, 3))
    mass = torch.rand(600)
    solved = best_entries(x, codes, torch.zeros(3, 4, 32), mass)
    one_hot = torch.nn.functional.one_hot(codes, 4).flatten(1).double()
    root = mass.double().sqrt()[:, None]
    reference = one_hot @ torch.linalg.lstsq(one_hot * root, x.double() * root, driver="gelsd").solution
    ours = one_hot @ solved.flatten(0, 1).double()
    loss = [float(((rebuilt - x.double()).square().sum(-1) * mass).sum()) for rebuilt in (ours, reference)]
    assert loss[0] < loss[1] * (1 + 1e-5)


def test_refinement_only_lowers_the_error() -> None:
    x = clustered()
    start = learn_code_rows(x, 4, 16, learning=CodeLearning(steps=50, rounds=0))
    errors = [error(refine_codes(x, start, rounds=rounds), x) for rounds in (1, 3, 10)]
    assert error(start, x) > errors[0] > errors[1] > errors[2]


def test_refinement_frees_rows_that_no_change_of_one_code_would_make_better() -> None:
    """Zero is 0 + 0; as 1 - 0.9 it is nearly there, and either code alone would take it further away."""
    books = torch.tensor([[[0.0], [1.0]], [[0.0], [-0.9]]])
    right = torch.cartesian_prod(torch.arange(2), torch.arange(2)).repeat(50, 1)  # (200, 2)
    x = books[0, right[:, 0]] + books[1, right[:, 1]]
    stuck = right.clone()
    stuck[::4] = 1  # all the zeros
    weights = torch.ones(200)
    weights[::4] = 1e-4  # so little that they do not move the entries
    start = CodedRows.of(stuck, books, "float32")
    refined = refine_codes(x, start, weights=weights)
    assert (refined.matrix()[::4].abs() < 0.01).float().mean() > 0.5
    assert (refined.matrix() - x)[weights == 1].abs().max() < 0.01


def test_learning_follows_the_weights() -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(50)
    x, weights = torch.zeros(200, 2), torch.ones(200)
    x[:100, 0], x[100:, 1] = signs, 2 * signs  # two entries cannot serve both halves
    weights[:100] = 100
    learning = CodeLearning(steps=100, batch_size=128, lr=0.1, rounds=0)
    plain, weighted = (learn_code_rows(x, 1, 2, learning=learning, weights=given) for given in (None, weights))
    assert (weighted.matrix()[:100] - x[:100]).square().mean() < 0.01
    assert (plain.matrix()[:100] - x[:100]).square().mean() > 0.2


def test_learning_depends_on_its_seed_alone_and_reports() -> None:
    x = clustered(200)
    calls: list[tuple[int, int]] = []
    learning = CodeLearning(steps=30, validate_every=10, rounds=2)
    first = learn_code_rows(x, 4, 4, learning=learning, progress=lambda done, total: calls.append((done, total)))
    torch.rand(5)
    again = learn_code_rows(x, 4, 4, learning=learning)
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.codebooks, again.codebooks)
    assert calls[-1] == (45, 45)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_learning_stops_early_when_nothing_is_gained() -> None:
    x = torch.zeros(100, 8)
    calls: list[int] = []
    learning = CodeLearning(steps=1_000, validate_every=10, patience=2, rounds=0)
    learn_code_rows(x, 2, 4, learning=learning, progress=lambda done, total: calls.append(done))
    assert calls[-2] < 900  # the last call is the end


def test_codes_that_cannot_be_packed_are_refused_before_any_work() -> None:
    with pytest.raises(UserError, match="power of two"):
        coded_table(torch.randn(10, 4), 2, 5)
    with pytest.raises(UserError, match="not finite"):
        coded_table(torch.full((10, 4), torch.inf), 2, 4)
