"""Matrix products in FP8 with a scale for every tile, which no rank's share of the work changes.

    rows    [R, I]   a scale per row and 128 channels        [----128----|----128----| ... ]
    weight  [O, I]   a scale per block of 128 x 128, so that the block of its transpose is the same one

Tiles and formats are DeepSeek-V3's (arXiv:2412.19437, section 3.3.2). A scale is the smallest power of two under which
the tile's largest number fits the format, as in the blockwise recipe of Transformer Engine and Megatron: to divide by
it changes exponents alone, so the only rounding is that to FP8.

The reference multiplies what the FP8 numbers stand for in the type of the computation, float64 too. The product on
units for FP8 is PyTorch's (``scaled_mm``); it is written against its source and not yet run on hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.schema.model import FP8_TILE
from megatron_moe.kernels import grouped
from megatron_moe.kernels.selection import fp8_units

BLOCK = FP8_TILE
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# --fp8-format -> the type of activations and weights, that of output gradients
FORMATS = {"e4m3": (E4M3, E4M3), "hybrid": (E4M3, E5M2)}
_LARGEST_FRACTION = 0.875  # the largest numbers are 448 = 0.875 * 2^9 and 57344 = 0.875 * 2^16
_LARGEST_EXPONENT = {E4M3: 9, E5M2: 16}
_ROWS_MULTIPLE, _SCALES_MULTIPLE = 4, 4  # cuBLASLt's, for 1 x 128 and 128 x 128


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
    exponent = exponent - _LARGEST_EXPONENT[form] + (fraction > _LARGEST_FRACTION)
    # Put together from bits: a library's power of two may be off by one unit in the last place.
    scales = ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, torch.nan)


def quantise_rows(x: Tensor, form: torch.dtype, block: int = BLOCK) -> Quantised:
    """[..., I] -> [..., I] and scales [..., I / block]; a last tile may be shorter."""
    width = x.shape[-1]
    tiles = _padded(x, (block,)).unflatten(-1, (-1, block))
    scales = scales_of(tiles.abs().amax(-1), form)
    return Quantised((tiles / scales.unsqueeze(-1)).to(form).flatten(-2)[..., :width], scales)


def quantise_blocks(weight: Tensor, form: torch.dtype, block: int = BLOCK) -> Quantised:
    """[..., O, I] -> [..., O, I] and scales [..., O / block, I / block]; last blocks may be smaller."""
    rows, columns = weight.shape[-2:]
    blocks = _padded(weight, (block, block)).unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
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


def _padded(x: Tensor, multiples: tuple[int, ...]) -> Tensor:
    """Zeros behind the last dims up to multiples; the same tensor where there are none to add."""
    missing = [-size % multiple for size, multiple in zip(x.shape[-len(multiples) :], multiples, strict=True)]
    return F.pad(x, [n for m in reversed(missing) for n in (0, m)]) if any(missing) else x


def reference_product(rows: Quantised, weight: Quantised, dtype: torch.dtype, block: int = BLOCK) -> Tensor:
    """[..., I] x [O, I] -> [..., O]: what the numbers stand for, multiplied in ``dtype``."""
    return F.linear(dequantise_rows(rows, dtype, block), dequantise_blocks(weight, dtype, block))


def hardware_product(rows: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """The same on FP8 units: torch's scaled product, tiles of 128, sums of each tile added up in float32.

    Its arguments as ``ScaledBlas.cpp`` of PyTorch checks them: rows [M, K] and their scales [M, K / 128] by columns;
    the weight's transpose [K, N] by columns, and its scales [K / 128 up to a multiple of 4, N / 128] by columns.
    """
    length, width = rows.values[..., 0].numel(), weight.values.shape[0]
    values = _padded_bytes(rows.values.flatten(0, -2), (_ROWS_MULTIPLE, BLOCK))
    scales = _padded(rows.scales.flatten(0, -2), (_ROWS_MULTIPLE, 1))
    weight_scales = _padded(weight.scales, (1, _SCALES_MULTIPLE)).contiguous()
    product = F.scaled_mm(
        values,
        _padded_bytes(weight.values, (BLOCK, BLOCK)).T,
        scales.T.contiguous().T,
        F.ScalingType.BlockWise1x128,
        weight_scales.T,
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return product[:length, :width].unflatten(0, rows.values.shape[:-1])


def _padded_bytes(values: Tensor, multiples: tuple[int, ...]) -> Tensor:
    return _padded(values.contiguous().view(torch.uint8), multiples).view(values.dtype)


_PRODUCTS: dict[str, Callable[[Quantised, Quantised, torch.dtype], Tensor]] = {
    "torch": reference_product,
    "scaled_mm": hardware_product,
}


@dataclass(frozen=True)
class ScaledProduct:
    """How a linear multiplies in FP8; a :class:`megatron_moe.parallel.products.Product`.

    Attributes:
        format: that of activations and weights.
        gradient_format: that of output gradients.
        implementation: ``torch`` or ``scaled_mm``.
        keeps_quantised: the rows are kept for the weight's gradient as they were multiplied, a byte a number; else as
            they were given, which costs nothing where somebody else keeps them.
    """

    format: torch.dtype
    gradient_format: torch.dtype
    implementation: str
    keeps_quantised: bool = True

    def forward(self, x: Tensor, weight_OI: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[..., I] x [O, I] -> [..., O], and what to keep of x."""
        rows = quantise_rows(x, self.format)
        product = _PRODUCTS[self.implementation](rows, quantise_blocks(weight_OI, self.format), x.dtype)
        return product, rows if self.keeps_quantised else (x,)

    def input_gradient(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """[..., O] x [O, I] -> [..., I]; the weight's blocks are those of the forward pass, from the other side."""
        values, scales = quantise_blocks(weight_OI, self.format)
        transposed = Quantised(values.T, scales.T)
        return _PRODUCTS[self.implementation](quantise_rows(grad, self.gradient_format), transposed, grad.dtype)

    def rows(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """What was kept, as a factor of the weight's gradient."""
        return dequantise_rows(Quantised(*kept), dtype) if self.keeps_quantised else kept[0]

    def keeping_given_rows(self) -> "ScaledProduct":
        """The same for rows that somebody else keeps."""
        return replace(self, keeps_quantised=False)


@dataclass(frozen=True)
class ScaledGroupedProduct:
    """How experts multiply in FP8; a :class:`megatron_moe.kernels.grouped.GroupedProduct` otherwise.

    Attributes:
        product: of one expert.
        backend: of the grouped product of what the numbers stand for, and of the weights' gradient.
    """

    product: ScaledProduct
    backend: str

    def forward(self, rows_RI: Tensor, weight_LOI: Tensor, counts_L: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[R, I] x [L, O, I] -> [R, O], and what to keep of the rows."""
        rows = quantise_rows(rows_RI, self.product.format)
        return self._multiply(rows, quantise_blocks(weight_LOI, self.product.format), counts_L, rows_RI.dtype), rows

    def input_gradient(self, grad_RO: Tensor, weight_LOI: Tensor, counts_L: Tensor) -> Tensor:
        """[R, O] x [L, O, I] -> [R, I]."""
        values, scales = quantise_blocks(weight_LOI, self.product.format)
        transposed = Quantised(values.transpose(1, 2), scales.transpose(1, 2))
        return self._multiply(quantise_rows(grad_RO, self.product.gradient_format), transposed, counts_L, grad_RO.dtype)

    def rows(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """What was kept, as a factor of the weights' gradient."""
        return self.product.rows(kept, dtype)

    def _multiply(self, rows: Quantised, weight: Quantised, counts_L: Tensor, dtype: torch.dtype) -> Tensor:
        if self.product.implementation == "torch":
            weight_LOI = dequantise_blocks(weight, dtype)
            return grouped.grouped_product(dequantise_rows(rows, dtype), weight_LOI, counts_L, self.backend)
        # PyTorch's grouped scaled product has no scales of 128; one product for each expert that has rows.
        out_RO = torch.empty(len(rows.values), weight.values.shape[1], dtype=dtype, device=rows.values.device)
        for expert, start, stop in grouped.runs(counts_L):
            part = Quantised(rows.values[start:stop], rows.scales[start:stop])
            out_RO[start:stop] = hardware_product(part, Quantised(*(t[expert] for t in weight)), dtype)
        return out_RO


def scaled_product(fp8_format: str | None, device: torch.device, dtype: torch.dtype) -> ScaledProduct | None:
    """How the linears of a run multiply in FP8; None where it has no FP8.

    Args:
        fp8_format: value of ``--fp8-format``.
        dtype: of the activations.
    """
    if fp8_format is None:
        return None
    return ScaledProduct(*FORMATS[fp8_format], fp8_units(device, dtype).implementation)
