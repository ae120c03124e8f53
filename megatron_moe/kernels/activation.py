"""Activations of feed-forward layers, gated or not."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.swiglu import swiglu

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


def is_fused(name: str, clamp: float | None, offset: float) -> bool:
    """Whether the activation is one operation, which keeps its inputs alone."""
    return name == "swiglu" and clamp is None and offset == 0


def activate(
    x_PF: Tensor,
    name: str,
    *,
    clamp: float | None = None,
    offset: float = 0.0,
    weights_1: Tensor | None = None,
    kernels: str = "torch",
) -> Tensor:
    """Apply an activation.

    Args:
        x_PF: [..., P, F]; P = 2 (gate, up) for a gated activation, else 1.
        name: as in ``--activation``.
        clamp: gated: the gate is cut at this, up at plus and minus this.
        offset: gated: added to up.
        weights_1: [..., 1] factors of the result.
        kernels: implementation of SwiGLU without clamp and offset.

    Returns:
        [..., F].
    """
    if is_fused(name, clamp, offset):
        return swiglu(x_PF, weights_1, kernels)
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
