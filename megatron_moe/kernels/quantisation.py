"""FP8 numbers with a scale for every tile, which no rank's share of the work changes.

    rows    [R, I]   a scale per row and 128 channels        [----128----|----128----| ... ]
    weight  [O, I]   a scale per block of 128 x 128, so that the block of its transpose is the same one

Tiles are DeepSeek-V3's (arXiv:2412.19437, section 3.3.2). A scale is the smallest power of two under which the tile's
largest number fits the format, as in the blockwise recipe of Transformer Engine and Megatron: to divide by it changes
exponents alone, so the only rounding is that to FP8.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.schema.model import FP8_TILE

BLOCK = FP8_TILE
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_FRACTION = 0.875  # the largest numbers are 448 = 0.875 * 2^9 and 57344 = 0.875 * 2^16
LARGEST_EXPONENT = {E4M3: 9, E5M2: 16}


class Quantised(NamedTuple):
    """FP8 numbers and what each tile of them is multiplied by (float32)."""

    values: Tensor
    scales: Tensor


def scales_of(largest: Tensor, form: torch.dtype) -> Tensor:
    """The smallest powers of two, float32, that bring magnitudes of up to ``largest`` into a format.

    Not a number where ``largest`` is not finite, so that a tile which overflowed does not look like one that did not.
    """
    largest = largest if largest.dtype == torch.float64 else largest.float()
    fraction, exponent = torch.frexp(largest)
    exponent = exponent - LARGEST_EXPONENT[form] + (fraction > LARGEST_FRACTION)
    # Put together from bits: a library's power of two may be off by one unit in the last place.
    scales = ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, torch.nan)


def quantise_rows(x: Tensor, form: torch.dtype, block: int = BLOCK) -> Quantised:
    """[..., I] -> [..., I] and scales [..., I / block]; a last tile may be shorter."""
    width = x.shape[-1]
    tiles = padded(x, (block,)).unflatten(-1, (-1, block))
    scales = scales_of(tiles.abs().amax(-1), form)
    return Quantised((tiles / scales.unsqueeze(-1)).to(form).flatten(-2)[..., :width], scales)


def quantise_blocks(weight: Tensor, form: torch.dtype, block: int = BLOCK) -> Quantised:
    """[..., O, I] -> [..., O, I] and scales [..., O / block, I / block]; last blocks may be smaller."""
    rows, columns = weight.shape[-2:]
    blocks = padded(weight, (block, block)).unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    scales = scales_of(blocks.abs().amax((-3, -1)), form)
    values = (blocks / scales[..., :, None, :, None]).to(form).flatten(-4, -3).flatten(-2)
    return Quantised(values[..., :rows, :columns], scales)


def dequantise_rows(rows: Quantised, dtype: torch.dtype, block: int = BLOCK) -> Tensor:
    """What quantised rows stand for, [..., I]."""
    return rows.values.to(dtype) * _spread(rows.scales.to(dtype), -1, block, rows.values.shape[-1])


def dequantise_blocks(weight: Quantised, dtype: torch.dtype, block: int = BLOCK) -> Tensor:
    """What quantised blocks stand for, [..., O, I]."""
    scales = _spread(weight.scales.to(dtype), -1, block, weight.values.shape[-1])
    return weight.values.to(dtype) * _spread(scales, -2, block, weight.values.shape[-2])


def _spread(scales: Tensor, dim: int, block: int, length: int) -> Tensor:
    return scales.repeat_interleave(block, dim).narrow(dim, 0, length)


def padded(x: Tensor, multiples: tuple[int, ...]) -> Tensor:
    """Zeros behind the last dims up to multiples; the same tensor where there are none to add."""
    missing = [-size % multiple for size, multiple in zip(x.shape[-len(multiples) :], multiples, strict=True)]
    return F.pad(x, [n for m in reversed(missing) for n in (0, m)]) if any(missing) else x
