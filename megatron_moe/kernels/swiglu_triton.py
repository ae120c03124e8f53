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


def swiglu_forward(x_2F: Tensor, weights_1: Tensor | None) -> Tensor:
    """[..., 2, F], [..., 1] -> [..., F]."""
    x_2F, width = x_2F.contiguous(), x_2F.shape[-1]
    y = x_2F.new_empty(*x_2F.shape[:-2], width)
    weights_1 = None if weights_1 is None else weights_1.contiguous()
    block = power_of_two(width, LARGEST_BLOCK)
    grid = (y.numel() // max(width, 1), triton.cdiv(width, block))
    launch(_forward, grid, x_2F, weights_1, y, width, weights_1 is not None, wide(x_2F.dtype), block)
    return y


def swiglu_backward(grad: Tensor, x_2F: Tensor, weights_1: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input, both halves in one tensor, and of the weights."""
    x_2F, width = x_2F.contiguous(), x_2F.shape[-1]
    weights_1 = None if weights_1 is None else weights_1.contiguous()
    grad_2F, grad_weights_1 = torch.empty_like(x_2F), None if weights_1 is None else torch.empty_like(weights_1)
    launch(
        _backward,
        (grad.numel() // max(width, 1),),
        grad.contiguous(),
        x_2F,
        weights_1,
        grad_2F,
        grad_weights_1,
        width,
        weights_1 is not None,
        wide(x_2F.dtype),
        power_of_two(width, LARGEST_BLOCK),
    )
    return grad_2F, grad_weights_1
