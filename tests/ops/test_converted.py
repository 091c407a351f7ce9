import pytest
import torch

from torchdefine.ops import converted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_and_gradients_are_those_of_one_tensor_after_another(dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((3, 4), (5,), (0, 2))]
    upstream = [torch.randn(tensor.shape).to(dtype) for tensor in tensors]
    ours = converted(tensors, dtype)
    theirs = [tensor.to(dtype) for tensor in tensors]
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    gradients = [torch.autograd.grad(outputs, tensors, upstream) for outputs in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_what_nobody_used_has_no_part_in_the_rest() -> None:
    tensors = [torch.randn(3, requires_grad=True) for _ in range(2)]
    used, _ = converted(tensors, torch.bfloat16)
    gradients = torch.autograd.grad(used.sum(), tensors, allow_unused=True)
    assert torch.equal(gradients[0], torch.ones(3))
    assert gradients[1] is None or not gradients[1].any()
