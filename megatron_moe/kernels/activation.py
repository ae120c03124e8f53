"""Activations of feed-forward layers, gated or not."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, which keeps its two inputs alone for the backward pass."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def activate(x_PF: Tensor, name: str, *, clamp: float | None = None, offset: float = 0.0) -> Tensor:
    """Apply an activation.

    Args:
        x_PF: [..., P, F]; P = 2 (gate, up) for a gated activation, else 1.
        name: as in ``--activation``.
        clamp: gated: the gate is cut at this, up at plus and minus this.
        offset: gated: added to up.

    Returns:
        [..., F].
    """
    if x_PF.shape[-2] == 1:
        return _POINTWISE[name](x_PF[..., 0, :])
    gate, up = x_PF[..., 0, :], x_PF[..., 1, :]
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    if offset:
        up = up + offset
    if name == "swiglu":
        return _SwiGLU.apply(gate, up)  # type: ignore[return-value]
    return _POINTWISE[name](gate) * up
