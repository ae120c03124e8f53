"""The functions of ``permutation.py`` in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.blocks import LARGEST_BLOCK, launch, power_of_two, wide


@triton.jit
def _spread(x_ptr, stride, copy_ids_ptr, rows_ptr, width, num_slots, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(copy_ids_ptr + row) // num_slots
    numbers = tl.load(x_ptr + token * stride + columns, mask=columns < width)
    tl.store(rows_ptr + row * width + columns, numbers, mask=columns < width)


@triton.jit
def _collect(
    rows_ptr,
    stride,
    row_ids_ptr,
    weights_ptr,
    y_ptr,
    width,
    NUM_SLOTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for k in range(NUM_SLOTS):
        row = tl.load(row_ids_ptr + token * NUM_SLOTS + k)
        there = columns < tl.where(row < 0, 0, width)
        numbers = tl.load(rows_ptr + row * stride + columns, mask=there, other=0.0).to(WIDE)
        if HAS_WEIGHTS:
            numbers *= tl.load(weights_ptr + token * NUM_SLOTS + k).to(WIDE)
        total += numbers
    tl.store(y_ptr + token * width + columns, total, mask=columns < width)


@triton.jit
def _collect_backward(
    grad_ptr,
    rows_ptr,
    stride,
    copy_ids_ptr,
    weights_ptr,
    grad_rows_ptr,
    grad_weights_ptr,
    width,
    num_slots,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    copy = tl.load(copy_ids_ptr + row)
    token = copy // num_slots
    weight = tl.load(weights_ptr + copy).to(WIDE)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + token * width + columns, mask=columns < width, other=0.0).to(WIDE)
        total += grad * tl.load(rows_ptr + row * stride + columns, mask=columns < width, other=0.0).to(WIDE)
        tl.store(grad_rows_ptr + row * width + columns, grad * weight, mask=columns < width)
    tl.store(grad_weights_ptr + copy, tl.sum(total, 0))


def spread(x_TD: Tensor, copy_ids_N: Tensor, num_slots: int) -> Tensor:
    """Row n is token copy_ids[n] // num_slots: [T, D] -> [N, D]. Rows may lie apart, as in all functions here."""
    num_rows, width = len(copy_ids_N), x_TD.shape[1]
    rows_ND = x_TD.new_empty(num_rows, width)
    block = power_of_two(width, LARGEST_BLOCK)
    grid = (num_rows, triton.cdiv(width, block))
    launch(_spread, grid, x_TD, x_TD.stride(0), copy_ids_N, rows_ND, width, num_slots, block)
    return rows_ND


def collect(rows_ND: Tensor, row_ids_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum of each token's rows, added up in float32 at least: [N, D] -> [T, D]."""
    (num_tokens, num_slots), width = row_ids_TK.shape, rows_ND.shape[1]
    y_TD = rows_ND.new_empty(num_tokens, width)
    block = power_of_two(width, LARGEST_BLOCK)
    launch(
        _collect,
        (num_tokens, triton.cdiv(width, block)),
        rows_ND,
        rows_ND.stride(0),
        row_ids_TK.contiguous(),
        None if weights_TK is None else weights_TK.contiguous(),
        y_TD,
        width,
        num_slots,
        weights_TK is not None,
        wide(rows_ND.dtype),
        block,
    )
    return y_TD


def collect_backward(grad_TD: Tensor, rows_ND: Tensor, copy_ids_N: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`collect` with weights: of the rows [N, D], and of the weights [T, K]; 0 for empty slots."""
    num_rows, width = rows_ND.shape
    grad_ND, grad_weights_TK = torch.empty_like(rows_ND), torch.zeros_like(weights_TK)
    launch(
        _collect_backward,
        (num_rows,),
        grad_TD,
        rows_ND,
        rows_ND.stride(0),
        copy_ids_N,
        weights_TK.contiguous(),
        grad_ND,
        grad_weights_TK,
        width,
        weights_TK.shape[1],
        wide(rows_ND.dtype),
        power_of_two(width, LARGEST_BLOCK),
    )
    return grad_ND, grad_weights_TK
