"""The functions of ``quantisation.py`` in Triton, for tiles of 128: one pass over the numbers; not for float64.

Rounding is arithmetic in float32, so that nothing is left to round in the conversion to FP8: that of Triton's
interpreter does not round to even and loses carries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.blocks import launch
from megatron_moe.kernels.quantisation import BLOCK, E4M3, E5M2, LARGEST_EXPONENT, Quantised

# exponent of the largest number as a fraction below one, bits of the mantissa, exponent of the smallest normal number
_FORMS = {E4M3: (LARGEST_EXPONENT[E4M3], 3, -6), E5M2: (LARGEST_EXPONENT[E5M2], 2, -14)}
_TILES = 8  # of a row, for one program


@triton.jit
def _magnitudes(x):
    """Bits of float32 without the sign: in the order of the numbers, and above them infinity, and what is none."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _exponents(bits, LARGEST_EXPONENT: tl.constexpr):
    """Of the scales: the fraction of frexp is half of the bits' 1.f, so 0.875 is at f = 0.75."""
    exponent = (bits >> 23) - 126 - LARGEST_EXPONENT + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum(exponent, -126)


@triton.jit
def _power(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scales(largest, exponent):
    """Not a number where the largest is not finite."""
    return tl.where(largest < 0x7F800000, _power(exponent), float("nan"))


@triton.jit
def _rounded(y, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """To a multiple of the format's unit at y: in a sum with 1.5 * 2^23 units, what is below one has no place."""
    exponent = tl.maximum(((y.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127, SMALLEST)
    many = (((exponent - MANTISSA + 150) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (y + many) - many


@triton.jit
def _quantise_rows(
    x_ptr,
    values_ptr,
    scales_ptr,
    width,
    num_tiles,
    LARGEST_EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
    columns = tiles[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(_magnitudes(x), 1)
    exponent = _exponents(largest, LARGEST_EXPONENT)
    values = _rounded(x * _power(-exponent)[:, None], MANTISSA, SMALLEST)
    tl.store(values_ptr + row * width + columns, values.to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row * num_tiles + tiles, _scales(largest, exponent), mask=tiles < num_tiles)


@triton.jit
def _quantise_blocks(
    x_ptr,
    values_ptr,
    scales_ptr,
    height,
    width,
    LARGEST_EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix, i, j = tl.program_id(2).to(tl.int64), tl.program_id(0), tl.program_id(1)
    rows, columns = i * BLOCK + tl.arange(0, BLOCK)[:, None], j * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (rows < height) & (columns < width)
    places = matrix * height * width + rows.to(tl.int64) * width + columns
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(_magnitudes(x), 1), 0)
    exponent = _exponents(largest, LARGEST_EXPONENT)
    values = _rounded(x * _power(-exponent), MANTISSA, SMALLEST)
    tl.store(values_ptr + places, values.to(values_ptr.dtype.element_ty), mask=inside)
    place = (matrix * tl.num_programs(0) + i) * tl.num_programs(1) + j
    tl.store(scales_ptr + place, _scales(largest, exponent))


def quantise_rows(x: Tensor, form: torch.dtype) -> Quantised:
    """[..., I] -> [..., I] and scales [..., I / 128]; a last tile may be shorter."""
    x, width = x.contiguous(), x.shape[-1]
    num_tiles = triton.cdiv(width, BLOCK)
    values, scales = torch.empty_like(x, dtype=form), x.new_empty(*x.shape[:-1], num_tiles, dtype=torch.float32)
    grid = (x.numel() // max(width, 1), triton.cdiv(num_tiles, _TILES))
    launch(_quantise_rows, grid, x, values, scales, width, num_tiles, *_FORMS[form], _TILES, BLOCK)
    return Quantised(values, scales)


def quantise_blocks(weight: Tensor, form: torch.dtype) -> Quantised:
    """[..., O, I] -> [..., O, I] and scales [..., O / 128, I / 128]; last blocks may be smaller."""
    weight, (height, width) = weight.contiguous(), weight.shape[-2:]
    blocks = triton.cdiv(height, BLOCK), triton.cdiv(width, BLOCK)
    values = torch.empty_like(weight, dtype=form)
    scales = weight.new_empty(*weight.shape[:-2], *blocks, dtype=torch.float32)
    grid = (*blocks, weight.numel() // max(height * width, 1))
    launch(_quantise_blocks, grid, weight, values, scales, height, width, *_FORMS[form], BLOCK, num_warps=8)
    return Quantised(values, scales)
