"""Embedding with the vocabulary cut over tp, and the placement that the output layer shares.

The stored vocabulary is padded to a multiple of tp; padding is not part of the logical tensor: its logits are -inf.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_moe.parallel.context import ParallelContext
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
