"""The functions of ``permutation.py`` in Triton. Rows may lie apart; the numbers of a row may not."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.blocks import LARGEST_BLOCK, launch, power_of_two, wide


@triton.jit
def _spread(
    x_ptr,
    stride,
    token_ids_ptr,
    weights_ptr,
    rows_ptr,
    width,
    HAS_WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x_ptr + tl.load(token_ids_ptr + row) * stride + columns, mask=columns < width)
    if HAS_WEIGHTS:
        numbers = numbers.to(WIDE) * tl.load(weights_ptr + row).to(WIDE)
    tl.store(rows_ptr + row * width + columns, numbers, mask=columns < width)


@triton.jit
def _collect(
    rows_ptr,
    stride,
    rows_of_tokens_ptr,
    starts_ptr,
    weights_ptr,
    y_ptr,
    num_tokens,
    num_rows,
    width,
    HAS_WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts_ptr + token)
    stop = tl.load(starts_ptr + token + 1, mask=token + 1 < num_tokens, other=num_rows)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for place in range(start, stop):
        row = tl.load(rows_of_tokens_ptr + place)
        numbers = tl.load(rows_ptr + row * stride + columns, mask=columns < width, other=0.0).to(WIDE)
        if HAS_WEIGHTS:
            numbers *= tl.load(weights_ptr + row).to(WIDE)
        total += numbers
    tl.store(y_ptr + token * width + columns, total, mask=columns < width)


@triton.jit
def _row_products(
    x_ptr,
    x_stride,
    rows_ptr,
    rows_stride,
    token_ids_ptr,
    products_ptr,
    width,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids_ptr + row)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        numbers = tl.load(x_ptr + token * x_stride + columns, mask=columns < width, other=0.0).to(WIDE)
        total += numbers * tl.load(rows_ptr + row * rows_stride + columns, mask=columns < width, other=0.0).to(WIDE)
    tl.store(products_ptr + row, tl.sum(total, 0))


def spread(x_TD: Tensor, token_ids_R: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """[T, D] tokens -> [R, D], the token of each row, times the row's weight."""
    num_rows, width = len(token_ids_R), x_TD.shape[1]
    rows_RD = x_TD.new_empty(num_rows, width)
    block = power_of_two(width, LARGEST_BLOCK)
    grid = (num_rows, triton.cdiv(width, block))
    launch(
        _spread,
        grid,
        x_TD,
        x_TD.stride(0),
        token_ids_R,
        weights_R,
        rows_RD,
        width,
        weights_R is not None,
        wide(x_TD.dtype),
        block,
    )
    return rows_RD


def collect(rows_RD: Tensor, rows_R: Tensor, starts_T: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """[R, D] rows -> [T, D]: each token is the weighed sum of its rows; a token without rows is zero."""
    num_tokens, width = len(starts_T), rows_RD.shape[1]
    y_TD = rows_RD.new_empty(num_tokens, width)
    block = power_of_two(width, LARGEST_BLOCK)
    launch(
        _collect,
        (num_tokens, triton.cdiv(width, block)),
        rows_RD,
        rows_RD.stride(0),
        rows_R,
        starts_T,
        weights_R,
        y_TD,
        num_tokens,
        len(rows_R),
        width,
        weights_R is not None,
        wide(rows_RD.dtype),
        block,
    )
    return y_TD


def row_products(x_TD: Tensor, rows_RD: Tensor, token_ids_R: Tensor) -> Tensor:
    """[R] product of each row with its token, in the type of the rows: the weights' gradient of :func:`spread`."""
    num_rows, width = rows_RD.shape
    products_R = rows_RD.new_empty(num_rows)
    launch(
        _row_products,
        (num_rows,),
        x_TD,
        x_TD.stride(0),
        rows_RD,
        rows_RD.stride(0),
        token_ids_R,
        products_R,
        width,
        wide(rows_RD.dtype),
        power_of_two(width, LARGEST_BLOCK),
    )
    return products_R
