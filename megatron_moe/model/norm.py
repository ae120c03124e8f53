"""Normalisation over the last dim, computed in float32 at least."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_moe.config.schema import ModelConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import Initial, ShardSpec, empty_parameter


class Norm(nn.Module):
    """RMSNorm (arXiv:1910.07467) or LayerNorm of ``size`` channels.

    Args:
        partial_tp: each tp rank normalises other tokens (sequence parallel) or other heads (qk-norm), so that the
            weight's gradient is partial over tp.
    """

    def __init__(
        self, size: int, config: ModelConfig, ctx: ParallelContext, dtype: torch.dtype, *, partial_tp: bool
    ) -> None:
        super().__init__()
        self.epsilon, self.kind = config.norm_epsilon, config.normalization

        def vector(value: float) -> ShardSpec:
            return ShardSpec((size,), partial_tp=partial_tp, initial=Initial("constant", value), decay=False)

        self.weight = empty_parameter(vector(1.0), ctx, dtype)
        self.bias = empty_parameter(vector(0.0), ctx, dtype) if self.kind == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        if self.kind == "LayerNorm":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
