"""Activations of feed-forward layers, gated or not."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up * weight, which keeps its inputs alone and writes both gradients into one tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_PF: Tensor, weights_1: Tensor | None) -> Tensor:
        gate, up = x_PF.unbind(-2)
        ctx.save_for_backward(x_PF, weights_1)  # type: ignore[arg-type]
        y = F.silu(gate).mul_(up)
        return y if weights_1 is None else y.mul_(weights_1)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x_PF, weights_1 = ctx.saved_tensors  # type: ignore[attr-defined]
        gate, up = x_PF.unbind(-2)
        grad_PF, grad_weights, work = torch.empty_like(x_PF), None, F.silu(gate)
        grad_gate, grad_up = grad_PF.unbind(-2)
        torch.mul(grad, work, out=grad_up)
        torch.mul(grad, up, out=work)
        if weights_1 is not None:
            grad_weights = torch.mul(grad_up, up, out=grad_gate).sum(-1, keepdim=True)
            grad_up.mul_(weights_1)
            work.mul_(weights_1)
        torch.ops.aten.silu_backward.grad_input(work, gate, grad_input=grad_gate)
        return grad_PF, grad_weights


def activate(
    x_PF: Tensor, name: str, *, clamp: float | None = None, offset: float = 0.0, weights_1: Tensor | None = None
) -> Tensor:
    """Apply an activation.

    Args:
        x_PF: [..., P, F]; P = 2 (gate, up) for a gated activation, else 1.
        name: as in ``--activation``.
        clamp: gated: the gate is cut at this, up at plus and minus this.
        offset: gated: added to up.
        weights_1: [..., 1] factors of the result.

    Returns:
        [..., F].
    """
    if name == "swiglu" and clamp is None and offset == 0:
        return _SwiGLU.apply(x_PF, weights_1)  # type: ignore[return-value]
    y = _activate(x_PF, name, clamp, offset)
    return y if weights_1 is None else y * weights_1


def _activate(x_PF: Tensor, name: str, clamp: float | None, offset: float) -> Tensor:
    if x_PF.shape[-2] == 1:
        return _POINTWISE[name](x_PF[..., 0, :])
    gate, up = x_PF.unbind(-2)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    if offset:
        up = up + offset
    return _POINTWISE[name](gate) * up
