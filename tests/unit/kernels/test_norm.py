"""The hand-written RMSNorm against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from megatron_moe.kernels.norm import rms_norm
from tests.helpers.building import normal


@pytest.mark.parametrize("shape", [(7, 12), (3, 2, 12), (2, 3, 4, 12)])
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    x, weight, grad = normal(1, *shape), normal(2, shape[-1]), normal(3, *shape)
    ours, theirs = [[t.clone().requires_grad_() for t in (x, weight)] for _ in range(2)]
    y, expected = rms_norm(*ours, 1e-2), F.rms_norm(theirs[0], weight.shape, theirs[1], 1e-2)
    torch.testing.assert_close(y, expected)
    y.backward(grad)
    expected.backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_bfloat16_is_computed_in_float32() -> None:
    """One rounding, at the end: as near to the exact value as the type allows. 1,000 squares would not add up in it."""
    x, weight = (normal(seed, *shape).bfloat16() for seed, shape in ((1, (5, 1000)), (2, (1000,))))
    exact = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
    found = rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)
    found.sum().backward()
    assert x.grad is not None and x.grad.dtype == weight.grad.dtype == torch.bfloat16
