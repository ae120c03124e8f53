"""Dense feed-forward layer and shared expert: column-parallel in, activation, row-parallel out."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_moe.config.schema import ModelConfig
from megatron_moe.kernels.activation import activate, is_fused
from megatron_moe.kernels.scaled import scaled_product
from megatron_moe.kernels.selection import choose
from megatron_moe.model.recompute import recomputed
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.linear import ColumnParallelLinear, RowParallelLinear, enter_tp
from megatron_moe.parallel.products import PLAIN
from megatron_moe.parallel.sharding import Initial, ShardSpec, empty_parameter
from megatron_moe.parallel.weight_gradients import WeightGradientQueue


class FeedForward(nn.Module):
    """[S', B, D] -> fc1 [P, F / tp, D] -> activation -> fc2 [D, F / tp] -> [S', B, D]; P = 2 when gated."""

    def __init__(
        self,
        width: int,
        config: ModelConfig,
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        sequence_parallel: bool,
        output_std: float,
        bias: bool,
        queue: WeightGradientQueue | None = None,
    ) -> None:
        super().__init__()
        self.ctx, self.sequence_parallel = ctx, sequence_parallel
        clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
        self.activate: Callable[[Tensor], Tensor] = partial(
            activate,
            name=config.activation,
            clamp=clamp,
            offset=offset,
            kernels=choose(config.kernels, ctx.device, dtype)["swiglu"],
        )
        self.has_fused_activation = is_fused(config.activation, clamp, offset)
        self.num_projections = 2 if config.gated else 1
        product = scaled_product(config, ctx.device, dtype) or PLAIN
        self.fc1 = ColumnParallelLinear(
            (self.num_projections, width, config.hidden_size),
            ctx,
            dtype,
            cut=1,
            bias=bias,
            initial=Initial("normal", config.init_method_std),
            queue=queue,
            product=product,
        )
        self.fc2 = RowParallelLinear(
            width,
            config.hidden_size,
            ctx,
            dtype,
            sequence_parallel=sequence_parallel,
            bias=bias,
            initial=Initial("normal", output_std),
            queue=queue,
            product=product,
        )

    def forward(self, x_SBD: Tensor) -> Tensor:
        """x [S', B, D] -> [S', B, D]."""
        hidden = self.fc1(enter_tp(x_SBD, self.ctx, self.sequence_parallel))
        hidden = hidden.unflatten(-1, (self.num_projections, -1))
        return self.fc2(self.activate(hidden))


class SharedExpert(nn.Module):
    """A feed-forward that sees every token, optionally weighed by a sigmoid gate of the token (Qwen2-MoE)."""

    def __init__(
        self,
        width: int,
        gated: bool,
        config: ModelConfig,
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        sequence_parallel: bool,
        output_std: float,
        recompute: bool = False,
        queue: WeightGradientQueue | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.feed_forward = FeedForward(
            width,
            config,
            ctx,
            dtype,
            sequence_parallel=sequence_parallel,
            output_std=output_std,
            bias=False,
            queue=queue,
        )
        spec = ShardSpec(
            (1, config.hidden_size), partial_tp=sequence_parallel, initial=Initial("normal", config.init_method_std)
        )
        self.gate_weight = empty_parameter(spec, ctx, dtype) if gated else None

    def forward(self, x_SBD: Tensor) -> Tensor:
        """x [S', B, D] -> [S', B, D]."""
        y_SBD = recomputed(self.feed_forward, x_SBD) if self.recompute else self.feed_forward(x_SBD)
        return y_SBD if self.gate_weight is None else y_SBD * torch.sigmoid(F.linear(x_SBD, self.gate_weight))
