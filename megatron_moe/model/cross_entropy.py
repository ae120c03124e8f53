"""Cross-entropy with the vocabulary cut over tp: softmax statistics are reduced, logits are never gathered."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels.selection import functions
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis, ParallelContext
from megatron_moe.parallel.sharding import ShardSpec


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Three reductions of [tokens] numbers: maximum, sum of exponentials, logit of the label."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, first_row: int, num_rows: int, axis: Axis, kernels: str
    ) -> Tensor:
        local_N = labels_N - first_row
        shard = functions("cross_entropy", kernels).shard_statistics(logits_NV, local_N, num_rows)
        peak_N = collectives.max_(shard.peak_N.clone(), axis)
        here_N = (local_N >= 0) & (local_N < num_rows)
        rescale_N = (shard.peak_N - peak_N).exp_()
        sums_2N = torch.stack([shard.sum_N * rescale_N, (shard.label_N - peak_N).masked_fill(~here_N, 0.0)])
        sums_2N = collectives.sum_(sums_2N, axis)
        ctx.save_for_backward(shard.kept_NV, local_N, shard.peak_N, rescale_N.div_(sums_2N[0]))
        ctx.num_rows, ctx.dtype, ctx.kernels, ctx.done = num_rows, logits_NV.dtype, kernels, False
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert not ctx.done, "the gradient was written over what it is made from: no second backward pass"
        ctx.done = True
        kept_NV, local_N, peak_N, rescale_N = ctx.saved_tensors
        gradient = functions("cross_entropy", ctx.kernels).shard_gradient
        grad_NV = gradient(kept_NV, local_N, ctx.num_rows, peak_N, rescale_N, grad_N.contiguous(), ctx.dtype)
        return grad_NV, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, spec: ShardSpec, ctx: ParallelContext, kernels: str = "torch"
) -> Tensor:
    """Loss of each token, replicated over tp. One backward pass.

    Args:
        logits_NV: [tokens, V_padded / tp] this rank's columns. Overwritten.
        labels_N: [tokens] int64, in the whole vocabulary.
        spec: placement of the output layer.
        kernels: implementation of the shard's part.

    Returns:
        [tokens] float32 (float64 for float64 logits).
    """
    stored, logical = spec.storage_slices(ctx)[0], spec.logical_slices(ctx)[0]
    num_rows = logical.stop - logical.start
    return _VocabParallelCrossEntropy.apply(logits_NV, labels_N, stored.start, num_rows, ctx.tp, kernels)  # type: ignore[return-value]
