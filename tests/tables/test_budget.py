import pytest

from torchdefine.errors import UserError
from torchdefine.tables import Budget


@pytest.mark.parametrize(
    ("text", "size", "floats_only"),
    [
        (1500, 1500, False),
        ("1500B", 1500, False),
        ("1.5MB", 1_500_000, False),
        ("512 KiB", 524_288, False),
        ("2gb", 2 * 10**9, False),
        ("4M parameters", 16_000_000, True),
        ("250k params", 1_000_000, True),
    ],
)
def test_sizes_are_read(text, size: int, floats_only: bool) -> None:
    assert Budget.of(text) == Budget(size, floats_only)
    assert Budget.of(Budget(size)) == Budget(size)


@pytest.mark.parametrize("text", ["", "MB", "4 apples", "-3MB", "1.2.3MB", 0, "0 parameters", "9" * 400 + "B"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(UserError, match="is not a size"):
        Budget.of(text)


@pytest.mark.parametrize("number", ["1.5", "3"])
def test_text_without_a_unit_is_refused(number: str) -> None:
    with pytest.raises(
        UserError, match=rf"The budget '{number}' has no unit: write {number}MB, {number}KB, or {number}M"
    ):
        Budget.of(number)


def test_sizes_are_said() -> None:
    assert str(Budget.of("1.5MB")) == "1.5 MB"
    assert str(Budget.of("4M parameters")) == "4 M parameters (16 MB in float32)"
