"""Activations of feed-forward layers, gated or not."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up * scale, saving its inputs only and recomputing the rest in one pass backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors  # type: ignore[attr-defined]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        # d silu = sigmoid + silu (1 - sigmoid)
        grad_gate = (sigmoid + silu * (1 - sigmoid)).mul_(up).mul_(grad)
        return grad_gate, silu.mul_(grad)


def activate(x_PF: Tensor, name: str) -> Tensor:
    """Apply an activation.

    Args:
        x_PF: [..., P, F]; P = 2 (gate, up) for a gated activation, else 1.
        name: as in ``--activation``.

    Returns:
        [..., F].
    """
    if name == "swiglu":
        return _SwiGLU.apply(x_PF[..., 0, :], x_PF[..., 1, :])  # type: ignore[return-value]
    y_F = _POINTWISE[name](x_PF[..., 0, :])
    return y_F * x_PF[..., 1, :] if x_PF.shape[-2] == 2 else y_F
