"""The functions of ``swiglu.py`` in Triton: one pass over memory each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.blocks import LARGEST_BLOCK, launch, power_of_two, wide


@triton.jit
def _forward(x_ptr, weights_ptr, y_ptr, width, HAS_WEIGHTS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + 2 * row * width + columns, mask=inside).to(WIDE)
    up = tl.load(x_ptr + (2 * row + 1) * width + columns, mask=inside).to(WIDE)
    y = gate / (1 + tl.exp(-gate)) * up
    if HAS_WEIGHTS:
        y *= tl.load(weights_ptr + row).to(WIDE)
    tl.store(y_ptr + row * width + columns, y, mask=inside)


@triton.jit
def _backward(
    grad_ptr,
    x_ptr,
    weights_ptr,
    grad_x_ptr,
    grad_weights_ptr,
    width,
    HAS_WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        gate = tl.load(x_ptr + 2 * row * width + columns, mask=inside, other=0.0).to(WIDE)
        up = tl.load(x_ptr + (2 * row + 1) * width + columns, mask=inside, other=0.0).to(WIDE)
        grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(WIDE)
        sigmoid = 1 / (1 + tl.exp(-gate))
        silu = gate * sigmoid
        if HAS_WEIGHTS:
            total += grad * silu * up
            grad *= tl.load(weights_ptr + row).to(WIDE)
        tl.store(grad_x_ptr + 2 * row * width + columns, grad * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
        tl.store(grad_x_ptr + (2 * row + 1) * width + columns, grad * silu, mask=inside)
    if HAS_WEIGHTS:
        tl.store(grad_weights_ptr + row, tl.sum(total, 0))


def swiglu_forward(x_R2F: Tensor, weights_R: Tensor | None) -> Tensor:
    """[R, 2, F] contiguous, [R] -> [R, F]."""
    num_rows, _, width = x_R2F.shape
    y_RF = x_R2F.new_empty(num_rows, width)
    block = power_of_two(width, LARGEST_BLOCK)
    grid = (num_rows, triton.cdiv(width, block))
    launch(_forward, grid, x_R2F, weights_R, y_RF, width, weights_R is not None, wide(x_R2F.dtype), block)
    return y_RF


def swiglu_backward(grad_RF: Tensor, x_R2F: Tensor, weights_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients [R, 2, F] of the input and [R] of the weights."""
    num_rows, _, width = x_R2F.shape
    grad_R2F = torch.empty_like(x_R2F)
    grad_weights_R = None if weights_R is None else torch.zeros_like(weights_R)
    launch(
        _backward,
        (num_rows,),
        grad_RF.contiguous(),
        x_R2F,
        weights_R,
        grad_R2F,
        grad_weights_R,
        width,
        weights_R is not None,
        wide(x_R2F.dtype),
        power_of_two(width, LARGEST_BLOCK),
    )
    return grad_R2F, grad_weights_R
