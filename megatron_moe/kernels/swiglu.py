"""SwiGLU with an optional weight per row, which keeps nothing but its inputs for the backward pass.

x_2F = [gate | up]      y = silu(gate) * up * weight
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.selection import functions


def swiglu(x_2F: Tensor, weights_1: Tensor | None = None, kernels: str = "torch") -> Tensor:
    """silu(gate) * up, each row times its weight.

    Args:
        x_2F: [..., 2, F]: gate, up.
        weights_1: [..., 1] one number a row, e.g. the gate weight of a copy of a token.
        kernels: the implementation, as :func:`megatron_moe.kernels.selection.choose` names it.

    Returns:
        [..., F] of the type of ``x_2F``.
    """
    return _SwiGLU.apply(x_2F, weights_1, kernels)  # type: ignore[return-value]


def swiglu_forward(x_2F: Tensor, weights_1: Tensor | None) -> Tensor:
    """[..., 2, F], [..., 1] -> [..., F]."""
    gate, up = x_2F.unbind(-2)
    y = F.silu(gate).mul_(up)
    return y if weights_1 is None else y.mul_(weights_1)


def swiglu_backward(grad: Tensor, x_2F: Tensor, weights_1: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input, both halves in one tensor, and of the weights."""
    gate, up = x_2F.unbind(-2)
    grad_2F, grad_weights_1, work = torch.empty_like(x_2F), None, F.silu(gate)
    grad_gate, grad_up = grad_2F.unbind(-2)
    torch.mul(grad, work, out=grad_up)
    torch.mul(grad, up, out=work)
    if weights_1 is not None:
        grad_weights_1 = torch.mul(grad_up, up, out=grad_gate).sum(-1, keepdim=True)
        grad_up.mul_(weights_1)
        work.mul_(weights_1)
    torch.ops.aten.silu_backward.grad_input(work, gate, grad_input=grad_gate)
    return grad_2F, grad_weights_1


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_2F: Tensor, weights_1: Tensor | None, kernels: str) -> Tensor:
        ctx.save_for_backward(x_2F, weights_1)
        ctx.kernels = kernels
        return functions("swiglu", kernels).swiglu_forward(x_2F, weights_1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        return *functions("swiglu", ctx.kernels).swiglu_backward(grad, *ctx.saved_tensors), None
