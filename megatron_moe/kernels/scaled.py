"""Matrix products in FP8, of linears and of experts; what is rounded how, ``quantisation.py`` says.

    forward    rows(x) blocks(W)^T        backward    rows(grad) blocks(W)        the weight's gradient: not in FP8

The reference multiplies what the FP8 numbers stand for in the type of the computation, float64 too. The product on
units for FP8 is PyTorch's (``scaled_mm``); it is written against its source and not yet run on hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.schema import ModelConfig
from megatron_moe.kernels import grouped
from megatron_moe.kernels.quantisation import (
    BLOCK,
    E4M3,
    E5M2,
    Quantised,
    dequantise_blocks,
    dequantise_rows,
    padded,
)
from megatron_moe.kernels.selection import Fp8Kernels, choose_fp8, functions

# --fp8-format -> the format of activations and weights, that of output gradients
FORMATS = {"e4m3": (E4M3, E4M3), "hybrid": (E4M3, E5M2)}
_ROWS_MULTIPLE, _SCALES_MULTIPLE = 4, 4  # cuBLASLt's, for 1 x 128 and 128 x 128


def reference_product(rows: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """[..., I] x [O, I] -> [..., O]: what the numbers stand for, multiplied in ``dtype``."""
    return F.linear(dequantise_rows(rows, dtype), dequantise_blocks(weight, dtype))


def hardware_product(rows: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """The same on FP8 units: torch's scaled product, tiles of 128, sums of each tile added up in float32.

    Its arguments as ``ScaledBlas.cpp`` of PyTorch checks them: E4M3 both; rows [M, K] and their scales [M, K / 128] by
    columns; the weight's transpose [K, N] by columns, its scales [K / 128 up to a multiple of 4, N / 128] by columns.
    """
    length, width = rows.values[..., 0].numel(), weight.values.shape[0]
    values = _padded_bytes(rows.values.flatten(0, -2), (_ROWS_MULTIPLE, BLOCK))
    scales = padded(rows.scales.flatten(0, -2), (_ROWS_MULTIPLE, 1))
    weight_scales = padded(weight.scales, (1, _SCALES_MULTIPLE)).contiguous()
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
    return padded(values.contiguous().view(torch.uint8), multiples).view(values.dtype)


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
        kernels: what multiplies, and what rounds.
        keeps_quantised: the rows are kept for the weight's gradient as they were multiplied, a byte a number; else as
            they were given, which costs nothing where somebody else keeps them.
    """

    format: torch.dtype
    gradient_format: torch.dtype
    kernels: Fp8Kernels
    keeps_quantised: bool = True

    def forward(self, x: Tensor, weight_OI: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[..., I] x [O, I] -> [..., O], and what to keep of x."""
        rows = self.quantise_rows(x, self.format)
        product = _PRODUCTS[self.kernels.product](rows, self.quantise_blocks(weight_OI), x.dtype)
        return product, rows if self.keeps_quantised else (x,)

    def input_gradient(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """[..., O] x [O, I] -> [..., I]; the weight's blocks are those of the forward pass, from the other side."""
        values, scales = self.quantise_blocks(weight_OI)
        rows = self.quantise_rows(grad, self.gradient_format)
        return _PRODUCTS[self.kernels.product](rows, Quantised(values.T, scales.T), grad.dtype)

    def rows(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """What was kept, as a factor of the weight's gradient."""
        return dequantise_rows(Quantised(*kept), dtype) if self.keeps_quantised else kept[0]

    def quantise_rows(self, x: Tensor, form: torch.dtype) -> Quantised:
        """[..., I] -> FP8, a scale per row and tile."""
        return functions("quantisation", self.kernels.quantisation).quantise_rows(x, form)

    def quantise_blocks(self, weight: Tensor) -> Quantised:
        """[..., O, I] -> FP8, a scale per block."""
        return functions("quantisation", self.kernels.quantisation).quantise_blocks(weight, self.format)

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

    def forward(self, rows_RI: Tensor, weight_LOI: Tensor, groups: grouped.Groups) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[R, I] x [L, O, I] -> [R, O], and what to keep of the rows."""
        rows = self.product.quantise_rows(rows_RI, self.product.format)
        return self._multiply(rows, self.product.quantise_blocks(weight_LOI), groups, rows_RI.dtype), rows

    def input_gradient(self, grad_RO: Tensor, weight_LOI: Tensor, groups: grouped.Groups) -> Tensor:
        """[R, O] x [L, O, I] -> [R, I]."""
        values, scales = self.product.quantise_blocks(weight_LOI)
        transposed = Quantised(values.transpose(1, 2), scales.transpose(1, 2))
        rows = self.product.quantise_rows(grad_RO, self.product.gradient_format)
        return self._multiply(rows, transposed, groups, grad_RO.dtype)

    def rows(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """What was kept, as a factor of the weights' gradient."""
        return self.product.rows(kept, dtype)

    def _multiply(self, rows: Quantised, weight: Quantised, groups: grouped.Groups, dtype: torch.dtype) -> Tensor:
        if self.product.kernels.product == "torch":
            weight_LOI = dequantise_blocks(weight, dtype)
            return grouped.grouped_product(dequantise_rows(rows, dtype), weight_LOI, groups, self.backend)
        # PyTorch's grouped scaled product has no scales of 128; one product for each expert that has rows.
        out_RO = torch.empty(len(rows.values), weight.values.shape[1], dtype=dtype, device=rows.values.device)
        for expert, start, stop in groups.runs:
            part = Quantised(rows.values[start:stop], rows.scales[start:stop])
            out_RO[start:stop] = hardware_product(part, Quantised(*(t[expert] for t in weight)), dtype)
        return out_RO


def scaled_product(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ScaledProduct | None:
    """How the linears of a run multiply in FP8; None where it has no FP8.

    Args:
        dtype: of the activations.
    """
    if config.fp8_format is None:
        return None
    chosen = choose_fp8(config.kernels, config.fp8_format, device, dtype)
    return ScaledProduct(*FORMATS[config.fp8_format], chosen)
