"""SwiGLU with an optional weight per row, forward and backward, which keeps nothing but its inputs.

    x_R2F = [gate | up]      y[r] = silu(gate[r]) * up[r] * weight[r]
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.selection import functions


def swiglu(x_2F: Tensor, weights: Tensor | None = None, kernels: str = "torch") -> Tensor:
    """silu(gate) * up, each row times its weight.

    Args:
        x_2F: [..., 2, F]: gate, up.
        weights: [...] one number a row, e.g. the gate weight of a copy of a token.
        kernels: the implementation, as :func:`megatron_moe.kernels.selection.choose` names it.

    Returns:
        [..., F] of the type of ``x_2F``.
    """
    return _SwiGLU.apply(x_2F, weights, kernels)  # type: ignore[return-value]


def swiglu_forward(x_R2F: Tensor, weights_R: Tensor | None) -> Tensor:
    """[R, 2, F], [R] -> [R, F]."""
    gate, up = x_R2F.unbind(1)
    y_RF = F.silu(gate).mul_(up)
    return y_RF if weights_R is None else y_RF.mul_(weights_R.unsqueeze(1))


def swiglu_backward(grad_RF: Tensor, x_R2F: Tensor, weights_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients [R, 2, F] of the input and [R] of the weights."""
    gate, up = x_R2F.unbind(1)
    grad_R2F, grad_weights_R = torch.empty_like(x_R2F), None
    silu = F.silu(gate)
    if weights_R is not None:
        grad_weights_R = (grad_RF * silu * up).sum(1)
        grad_RF = grad_RF * weights_R.unsqueeze(1)
    torch.mul(silu, grad_RF, out=grad_R2F[:, 1])
    grad_R2F[:, 0] = torch.ops.aten.silu_backward(grad_RF * up, gate)
    return grad_R2F, grad_weights_R


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_2F: Tensor, weights: Tensor | None, kernels: str) -> Tensor:
        ctx.save_for_backward(x_2F, weights)
        ctx.kernels = kernels
        weights_R = None if weights is None else weights.reshape(-1)
        y_RF = functions("swiglu", kernels).swiglu_forward(x_2F.flatten(0, -3).contiguous(), weights_R)
        return y_RF.view(*x_2F.shape[:-2], x_2F.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        x_2F, weights = ctx.saved_tensors
        weights_R = None if weights is None else weights.reshape(-1)
        grad_RF = grad.reshape(-1, grad.shape[-1])
        backward = functions("swiglu", ctx.kernels).swiglu_backward
        grad_R2F, grad_weights_R = backward(grad_RF, x_2F.flatten(0, -3).contiguous(), weights_R)
        return grad_R2F.view(x_2F.shape), None if grad_weights_R is None else grad_weights_R.view(weights.shape), None
