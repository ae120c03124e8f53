"""Normalisation over the last dim, computed in float32 at least."""

import torch
from torch import Tensor, nn

from megatron_moe.config.schema import ModelConfig
from megatron_moe.kernels.selection import choose, functions
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import Initial, ShardSpec, empty_parameter


class Norm(nn.Module):
    """RMSNorm (arXiv:1910.07467) or LayerNorm of ``size`` channels.

    Args:
        partial_tp: each tp rank normalises other tokens (sequence parallel) or other heads (qk-norm), so that the
            weight's gradient is partial over tp.
        epsilon: default: the model's.
    """

    def __init__(
        self,
        size: int,
        config: ModelConfig,
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        partial_tp: bool,
        epsilon: float | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon if epsilon is None else epsilon
        self.kernels = choose(config.kernels, ctx.device, dtype)["norm"]
        self.normalise = functions("norm", self.kernels).normalise

        def vector(value: float) -> ShardSpec:
            return ShardSpec((size,), partial_tp=partial_tp, initial=Initial("constant", value), decay=False)

        self.weight = empty_parameter(vector(1.0), ctx, dtype)
        self.bias = empty_parameter(vector(0.0), ctx, dtype) if config.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self.normalise(x, self.weight, self.bias, self.epsilon)


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection as one vector (OLMoE), while tp cuts the heads.

    Args:
        size: channels of all heads.
        cut: tp cuts them, so that the sum of squares is over tp; else every rank has them all and uses some of them.
    """

    def __init__(self, size: int, config: ModelConfig, ctx: ParallelContext, dtype: torch.dtype, *, cut: bool) -> None:
        super().__init__()
        self.size, self.epsilon, self.axis = size, config.qk_norm_epsilon, ctx.tp if cut else None
        shards = (("tp", 0),) if cut else ()
        initial = Initial("constant", 1.0)
        spec = ShardSpec((size,), shards=shards, partial_tp=not cut, initial=initial, decay=False)
        self.weight = empty_parameter(spec, ctx, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size / tp] -> the same shape."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        if self.axis is not None:
            # Partial sums -> replicated; each rank's gradient of the sum is that of its heads, hence partial again.
            squares = collectives.replicate(collectives.all_reduce(squares, self.axis), self.axis)
        return (wide * torch.rsqrt(squares / self.size + self.epsilon)).to(x.dtype) * self.weight
