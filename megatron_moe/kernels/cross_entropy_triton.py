"""The functions of ``cross_entropy.py`` in Triton: the logits are read once forward; kept as they are, not widened."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.blocks import LARGEST_BLOCK, launch, power_of_two, wide
from megatron_moe.kernels.cross_entropy import ShardStatistics


@triton.jit
def _statistics(
    logits_ptr,
    stride,
    labels_ptr,
    peak_ptr,
    sum_ptr,
    label_ptr,
    num_columns,
    LOWEST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride
    peak = tl.full((), LOWEST, dtype=WIDE)
    total = tl.full((), 0.0, dtype=WIDE)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + columns, mask=columns < num_columns, other=float("-inf")).to(WIDE)
        higher = tl.maximum(peak, tl.max(logits, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(logits - higher), 0)
        peak = higher
    label = tl.load(labels_ptr + token)
    here = (label >= 0) & (label < num_columns)
    tl.store(peak_ptr + token, peak)
    tl.store(sum_ptr + token, total)
    tl.store(label_ptr + token, tl.load(row_ptr + label, mask=here, other=0.0).to(WIDE))


@triton.jit
def _gradient(
    logits_ptr,
    stride,
    labels_ptr,
    peak_ptr,
    rescale_ptr,
    grad_ptr,
    num_columns,
    num_stored,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + token * stride + columns
    stored, label, grad = columns < num_stored, tl.load(labels_ptr + token), tl.load(grad_ptr + token).to(WIDE)
    known = columns < num_columns
    logits = tl.load(pointers, mask=known, other=float("-inf")).to(WIDE)
    probability = tl.exp(logits - tl.load(peak_ptr + token)) * tl.load(rescale_ptr + token)
    tl.store(pointers, (probability - tl.where(known & (columns == label), 1.0, 0.0)) * grad, mask=stored)


def shard_statistics(logits_NV: Tensor, labels_N: Tensor, num_columns: int) -> ShardStatistics:
    """Read the logits once; rows may lie apart, the numbers of a row may not."""
    num_tokens, dtype = len(logits_NV), torch.promote_types(logits_NV.dtype, torch.float32)
    peak_N, sum_N, label_N = (torch.empty(num_tokens, dtype=dtype, device=logits_NV.device) for _ in range(3))
    launch(
        _statistics,
        (num_tokens,),
        logits_NV,
        logits_NV.stride(0),
        labels_N,
        peak_N,
        sum_N,
        label_N,
        num_columns,
        torch.finfo(torch.float32).min,
        wide(dtype),
        power_of_two(num_columns, LARGEST_BLOCK),
    )
    return ShardStatistics(logits_NV, peak_N, sum_N, label_N)


def shard_gradient(
    kept_NV: Tensor,
    labels_N: Tensor,
    num_columns: int,
    peak_N: Tensor,
    rescale_N: Tensor,
    grad_N: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits, in their own memory."""
    num_tokens, num_stored = kept_NV.shape
    block = power_of_two(num_stored, LARGEST_BLOCK)
    launch(
        _gradient,
        (num_tokens, triton.cdiv(num_stored, block)),
        kept_NV,
        kept_NV.stride(0),
        labels_N,
        peak_N,
        rescale_N,
        grad_N.contiguous(),
        num_columns,
        num_stored,
        wide(dtype),
        block,
    )
    return kept_NV
