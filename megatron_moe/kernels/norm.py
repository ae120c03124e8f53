"""RMSNorm (arXiv:1910.07467) and LayerNorm, computed in float32 at least.

PyTorch has one kernel for an RMSNorm on GPUs. On CPU it is made of small operators there, each with a backward and
tensors of its own, so it is written by hand: half the time, and no more is kept than x and one number a row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """x [..., size] -> the same shape; with a bias LayerNorm, without RMSNorm."""
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # a compiler fuses the small operators itself
        return rms_norm(x, weight, epsilon)
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """y = x r w with r = (mean(x^2) + epsilon)^-1/2 of each row, in few passes over x."""
    return _RMSNorm.apply(x, weight, epsilon)  # type: ignore[return-value]


class _RMSNorm(torch.autograd.Function):
    """With g the gradient of y:  dx = r w g - r^3 x sum(g w x) / size,  dw = sum over rows of g x r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = _wide(x)
        scale_1 = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()  # [..., 1]
        scale_1.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale_1)
        return (wide * scale_1).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale_1 = ctx.saved_tensors
        wide, wide_weight = _wide(x), _wide(weight)
        products = _wide(grad) * wide
        grad_weight = products.flatten(0, -2).T @ scale_1.flatten()
        pull_1 = (products @ wide_weight).unsqueeze(-1).mul_(scale_1**3).div_(-x.shape[-1])
        del products  # its memory serves the next line
        grad_x = (grad * scale_1).mul_(wide_weight).addcmul_(wide, pull_1)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
