"""The function of ``norm.py`` by Transformer Engine. Written against its interface; not yet run on hardware.

Its norms are modules with weights of their own, and its functions differ between versions: so a module without memory
is called with our weights in the place of its own.
"""

from functools import cache

import torch
import transformer_engine.pytorch as te
from torch import Tensor


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """x [..., size] -> the same shape; with a bias LayerNorm, without RMSNorm."""
    own = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    module = _module("RMSNorm" if bias is None else "LayerNorm", len(weight), epsilon, weight.dtype)
    return torch.func.functional_call(module, own, (x,))


@cache
def _module(kind: str, size: int, epsilon: float, dtype: torch.dtype) -> torch.nn.Module:
    return getattr(te, kind)(size, eps=epsilon, dtype=dtype, device="meta")
