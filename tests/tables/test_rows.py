import torch
from hypothesis import given
from hypothesis import strategies as st

from torchdefine.tables.fields import pack, packed_width, unpack


@given(bits=st.integers(1, 8), count=st.integers(1, 40), rows=st.integers(1, 4), seed=st.integers(0, 1000))
def test_packing_is_undone_by_unpacking(bits: int, count: int, rows: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_width(count, bits))
    assert torch.equal(unpack(packed, bits, count).long(), codes)


def test_the_layout_is_the_documented_one() -> None:
    assert pack(torch.tensor([1, 2, 3]), 4).tolist() == [0x21, 0x03]
    assert pack(torch.tensor([5, 2, 7]), 3).tolist() == [0b11_01_10, 0b1_0_1]  # fields of 2 and 1 bits
    assert packed_width(32, 4) == 16
    assert [packed_width(384, bits) for bits in (1, 2, 3, 4, 6, 8)] == [48, 96, 144, 192, 288, 384]
