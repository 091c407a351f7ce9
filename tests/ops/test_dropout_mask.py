"""What is kept, by torch and by kernels; the latter against Philox worked out by hand."""

import pytest
import torch
from tests.ops.philox import WORD, drawn_mask, philox
from torch import Tensor

from torchdefine.ops.dropout import Kept, kept_features

SHARE = 1 - 19661 / 65536  # 0.7, as sixteen bits have it


@pytest.mark.parametrize(
    ("word", "rounds", "expected"),
    [
        (0, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (0, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (WORD, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ],
)
def test_philox_has_its_published_values(word: int, rounds: int, expected: tuple[int, ...]) -> None:
    counter = torch.tensor(word)
    found = philox((counter, counter, counter, counter), word << 32 | word, rounds)
    assert tuple(map(int, found)) == expected


def test_a_mask_keeps_the_share_that_it_should() -> None:
    assert kept_features(torch.empty(1, 4), 0.0, by_kernels=False) == Kept(None, 1.0)
    mask = kept_features(torch.empty(200, 500), 0.1, by_kernels=False).by
    assert mask is not None
    assert mask.dtype == torch.bool
    assert 0.895 < mask.double().mean() < 0.905


def test_plain_torch_gets_a_mask_of_rows_and_kernels_get_a_seed() -> None:
    like = torch.empty(2, 3, 5)
    mask, share = kept_features(like, 0.25, by_kernels=False)
    assert mask is not None
    assert (mask.shape, mask.dtype, share) == ((6, 5), torch.bool, 0.75)
    seed, share = kept_features(like, 0.3, by_kernels=True)
    assert seed is not None
    assert (seed.shape, seed.dtype, share) == ((1,), torch.int64, SHARE)


def test_seeds_come_from_torchs_generator() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(4)
        drawn.append([int(kept_features(torch.empty(1, 1), 0.5, by_kernels=True).by) for _ in range(3)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
    assert max(drawn[0]) > 2**40


@pytest.mark.parametrize("p", [0.0, 1e-6])
def test_kernels_draw_nothing_where_nothing_is_dropped(p: float) -> None:
    assert kept_features(torch.empty(2, 2), p, by_kernels=True) == Kept(None, 1.0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999999])
def test_the_share_is_the_one_that_kernels_keep(kernel_device: str, p: float) -> None:
    from torchdefine.ops.dropout_kernels import dropped_steps

    share = kept_features(torch.empty(2, 2), p, by_kernels=True).probability
    assert 0 < share < 1
    assert share == 1 - dropped_steps(share) / 65536
    assert share == pytest.approx(1 - p, abs=1.6e-5)


def drawn_by_kernel(device: str, seed: int, rows: int, width: int) -> Tensor:
    from torchdefine.ops.dropout_kernels import ReluDropout

    return (
        ReluDropout.apply(torch.ones(rows, width, device=device), None, torch.tensor([seed], device=device), SHARE) != 0
    )


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (70, 300), (33, 128)])
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 0x123456789ABCDEF])
def test_kernels_draw_what_philox_gives(kernel_device: str, rows: int, width: int, seed: int) -> None:
    expected = drawn_mask(torch.tensor([seed]), rows, width, SHARE)
    assert torch.equal(drawn_by_kernel(kernel_device, seed, rows, width).cpu(), expected)


def test_features_are_kept_independently_of_one_another_and_from_call_to_call() -> None:
    rows, width = 1000, 512
    first, second = (drawn_mask(torch.tensor([seed]), rows, width, SHARE).double() for seed in (77, 78))
    sigmas = (rows * width / SHARE / (1 - SHARE)) ** 0.5
    assert abs(first.mean() - SHARE) * sigmas < 4
    assert (first.mean(0) - SHARE).abs().max() * sigmas / width**0.5 < 5
    assert (first.mean(1) - SHARE).abs().max() * sigmas / rows**0.5 < 5
    first, second = ((mask - SHARE) / (SHARE * (1 - SHARE)) ** 0.5 for mask in (first, second))
    for down, right in [(0, 1), (0, 2), (0, 4), (0, 8), (1, 0), (1, 1), (8, 0), (1, 8)]:
        product = first[: rows - down, : width - right] * first[down:, right:]
        assert abs(product.mean()) * product.numel() ** 0.5 < 4
    assert abs((first * second).mean()) * first.numel() ** 0.5 < 4
