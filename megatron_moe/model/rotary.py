"""Rotary position embedding (arXiv:2104.09864) with its two layouts and its scalings for longer sequences.

    half:         channel i turns with i + rotated / 2        (default)
    interleaved:  channel 2 i turns with 2 i + 1              (DeepSeek's weights)

Scalings for sequences longer than those of the training before:

    linear   every frequency / factor
    llama3   long waves / factor, short waves kept, a line between them
    yarn     the same by channel (arXiv:2309.00071), and larger cosines and sines: scores grow with log(factor)
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.schema import ModelConfig


class Rotary:
    """Cosines and sines of positions.

    Args:
        num_channels: channels of a head.
        percent: share of them that is rotated; the rest pass.
    """

    def __init__(self, num_channels: int, percent: float, config: ModelConfig, device: torch.device) -> None:
        self.num_rotated = int(num_channels * percent) // 2 * 2
        self.interleaved = config.rotary_interleaved
        self.frequencies = rotary_frequencies(self.num_rotated, config).to(device)
        self.magnitude = 1.0
        if config.rope_type == "yarn":
            factor = config.rotary_scaling_factor
            self.magnitude = yarn_mscale(factor, config.mscale) / yarn_mscale(factor, config.mscale_all_dim)

    def tables(self, positions_SB: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [S, B, 1, rotated / 2] of positions, computed in float64 so that long positions stay exact."""
        angles = (positions_SB.unsqueeze(-1).to(torch.float64) * self.frequencies).unsqueeze(2)
        return (angles.cos() * self.magnitude).to(dtype), (angles.sin() * self.magnitude).to(dtype)

    def rotate(self, x_SBHC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first channels of each head."""
        rotated, rest = x_SBHC[..., : self.num_rotated], x_SBHC[..., self.num_rotated :]
        turned: Tensor = _Rotation.apply(rotated, *tables, self.interleaved)  # type: ignore[assignment]
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class _Rotation(torch.autograd.Function):
    """Keeps the tables alone: the gradient is turned back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x_SBHR: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x_SBHR, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin, ctx.interleaved), None, None, None


def _turned(x_SBHR: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    shape, dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    pairs = x_SBHR.unflatten(-1, shape)
    turned = pairs * cos.unsqueeze(dim)
    (first, second), (turned_first, turned_second) = pairs.unbind(dim), turned.unbind(dim)
    turned_first.addcmul_(second, sin, value=-1)
    turned_second.addcmul_(first, sin)
    return turned.flatten(-2)


def rotary_frequencies(num_rotated: int, config: ModelConfig) -> Tensor:
    """[num_rotated / 2] radians per position, float64, highest first, scaled as ``--rope-type`` says."""
    exponents = torch.arange(0, num_rotated, 2, dtype=torch.float64) / num_rotated
    frequencies = config.rotary_base**-exponents
    scaled = frequencies / config.rotary_scaling_factor
    if config.rope_type == "linear":
        return scaled
    if config.rope_type == "llama3":
        return torch.lerp(frequencies, scaled, _llama3_share(frequencies, config))
    if config.rope_type == "yarn":
        return torch.lerp(frequencies, scaled, _yarn_share(num_rotated, config))
    return frequencies


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale log(factor) + 1: arXiv:2309.00071, equation 22, with DeepSeek's strength."""
    return 0.1 * mscale * math.log(factor) + 1.0


def _llama3_share(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """How far each frequency is scaled, 0 to 1, by the number of its waves in an original sequence."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    waves = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    return 1 - ((waves - low) / (high - low)).clamp(0, 1)


def _yarn_share(num_rotated: int, config: ModelConfig) -> Tensor:
    """The same by a line over the channels, from the one with ``beta_fast`` waves to that with ``beta_slow``."""

    def channel(waves: float) -> float:
        longest = config.original_max_position_embeddings / (waves * 2 * math.pi)
        return num_rotated * math.log(longest) / (2 * math.log(config.rotary_base))

    low, high = channel(config.beta_fast), channel(config.beta_slow)
    if config.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_rotated - 1)
    channels = torch.arange(num_rotated // 2, dtype=torch.float64)
    return ((channels - low) / (high - low if high != low else 1e-3)).clamp(0, 1)
