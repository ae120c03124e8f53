"""Embedding, output layer and cross-entropy with the vocabulary cut over tp; logits are never gathered.

The stored vocabulary is padded to a multiple of tp; padding is not part of the logical tensor: its logits are -inf.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis, ParallelContext
from megatron_moe.parallel.linear import leave_tp
from megatron_moe.parallel.sharding import Initial, ShardSpec, empty_parameter


def padded_vocab(vocab_size: int, multiple: int, tp: int) -> int:
    """Rows stored for a vocabulary: the next multiple of ``multiple * tp`` (Megatron's rule)."""
    return math.ceil(vocab_size / (multiple * tp)) * multiple * tp


def vocab_spec(vocab_size: int, hidden_size: int, multiple: int, ctx: ParallelContext, initial: Initial) -> ShardSpec:
    """Placement of the embedding and of the output layer: logical [V, D], stored rows padded and cut over tp."""
    padded = (padded_vocab(vocab_size, multiple, ctx.tp.size), hidden_size)
    return ShardSpec((vocab_size, hidden_size), shards=(("tp", 0),), padded=padded, initial=initial)


class VocabParallelEmbedding(nn.Module):
    """Tokens [S, B] -> [S', B, D]. Each rank looks up its rows; the sum over tp scatters the sequence if it is cut."""

    def __init__(self, spec: ShardSpec, ctx: ParallelContext, dtype: torch.dtype, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = ctx.tp, sequence_parallel
        self.weight = empty_parameter(spec, ctx, dtype)
        self.first_row = spec.storage_slices(ctx)[0].start

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """tokens [S, B] int64 -> [S', B, D]."""
        if self.axis.size == 1:
            return F.embedding(tokens_SB, self.weight)
        local_SB = tokens_SB - self.first_row
        elsewhere_SB = (local_SB < 0) | (local_SB >= self.weight.shape[0])
        x_SBD = F.embedding(local_SB.masked_fill(elsewhere_SB, 0), self.weight)
        x_SBD = x_SBD.masked_fill(elsewhere_SB.unsqueeze(-1), 0.0)
        return leave_tp(x_SBD, self.axis, self.sequence_parallel)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss from a shard of the logits; softmax statistics are reduced over tp, logits never are.

    Three reductions of [tokens] numbers: maximum, sum of exponentials, logit of the label. Logits are the largest
    tensor of a step, so there is one of that size: exponentials are put in their place, and later the gradient.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_NV: Tensor, labels_N: Tensor, first_row: int, num_rows: int, axis: Axis
    ) -> Tensor:
        work_NV = logits_NV.detach().to(torch.promote_types(logits_NV.dtype, torch.float32))
        if num_rows < work_NV.shape[1]:  # padding rows are no tokens
            work_NV[:, num_rows:] = -torch.inf
        peak_N = collectives.max_(work_NV.amax(1), axis)
        local_N = labels_N - first_row
        elsewhere_N = (local_N < 0) | (local_N >= work_NV.shape[1])
        local_N = local_N.masked_fill(elsewhere_N, 0)
        label_logit_N = work_NV.gather(1, local_N.unsqueeze(1)).squeeze(1) - peak_N
        exp_NV = work_NV.sub_(peak_N.unsqueeze(1)).exp_()
        sums_2N = torch.stack([exp_NV.sum(1), label_logit_N.masked_fill(elsewhere_N, 0.0)])
        sums_2N = collectives.sum_(sums_2N, axis)
        ctx.save_for_backward(exp_NV, sums_2N[0], local_N, elsewhere_N)
        ctx.logits_dtype = logits_NV.dtype  # type: ignore[attr-defined]
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    def backward(ctx: FunctionCtx, grad_N: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        exp_NV, sum_N, local_N, elsewhere_N = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_NV = exp_NV.mul_((grad_N / sum_N).unsqueeze(1))
        here_N = grad_N.masked_fill(elsewhere_N, 0.0)
        grad_NV.scatter_add_(1, local_N.unsqueeze(1), -here_N.unsqueeze(1))
        return grad_NV.to(ctx.logits_dtype), None, None, None, None  # type: ignore[attr-defined]


def vocab_parallel_cross_entropy(logits_NV: Tensor, labels_N: Tensor, spec: ShardSpec, ctx: ParallelContext) -> Tensor:
    """Loss of each token, replicated over tp.

    Args:
        logits_NV: [tokens, V_padded / tp] this rank's columns. Overwritten.
        labels_N: [tokens] int64, in the whole vocabulary.
        spec: placement of the output layer.

    Returns:
        [tokens] float32 (float64 for float64 logits).
    """
    stored, logical = spec.storage_slices(ctx)[0], spec.logical_slices(ctx)[0]
    num_rows = logical.stop - logical.start
    return _VocabParallelCrossEntropy.apply(logits_NV, labels_N, stored.start, num_rows, ctx.tp)  # type: ignore[return-value]
