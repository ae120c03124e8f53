"""Rotary position embedding (arXiv:2104.09864), half-split layout: channel i pairs with i + rotated/2."""

import torch
from torch import Tensor


class Rotary:
    """Cosines and sines of positions.

    Args:
        num_channels: channels of a head.
        percent: share of them that is rotated; the rest pass.
        base: theta.
    """

    def __init__(self, num_channels: int, percent: float, base: float, device: torch.device) -> None:
        self.num_rotated = int(num_channels * percent) // 2 * 2
        exponents = torch.arange(0, self.num_rotated, 2, dtype=torch.float64, device=device) / self.num_rotated
        self.frequencies = base**-exponents

    def tables(self, positions_SB: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [S, B, 1, rotated] of positions, computed in float64 so that long positions stay exact."""
        angles = positions_SB.unsqueeze(-1).to(torch.float64) * self.frequencies
        angles = torch.cat([angles, angles], -1).unsqueeze(2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x_SBHC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first channels of each head."""
        cos, sin = tables
        rotated, rest = x_SBHC[..., : self.num_rotated], x_SBHC[..., self.num_rotated :]
        first, second = rotated.chunk(2, -1)
        rotated = rotated * cos + torch.cat([-second, first], -1) * sin
        return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated
