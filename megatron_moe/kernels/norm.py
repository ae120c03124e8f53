"""RMSNorm (arXiv:1910.07467) and LayerNorm, computed in float32 at least."""

import torch.nn.functional as F
from torch import Tensor


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """x [..., size] -> the same shape; with a bias LayerNorm, without RMSNorm."""
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    return F.rms_norm(x, weight.shape, weight, epsilon)
