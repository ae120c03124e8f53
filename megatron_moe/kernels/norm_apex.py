"""The function of ``norm.py`` by NVIDIA Apex. Written against its interface; not yet run on hardware."""

from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
from torch import Tensor


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """x [..., size] -> the same shape; with a bias LayerNorm, without RMSNorm."""
    if bias is not None:
        return fused_layer_norm_affine(x, weight, bias, weight.shape, eps=epsilon)
    return fused_rms_norm_affine(x, weight, weight.shape, eps=epsilon)
