"""Grouped-query attention: heads cut over tp, the sequence over cp.

    x [S', B, D] --gather S (tp)--> query, key, value (heads / tp) --rotary--> core --> output --scatter S--> [S', B, D]

Key-value heads fewer than tp: their projections are whole on every rank, which uses the heads its queries need.
"""

import torch
from torch import Tensor

from megatron_moe.config.schema import ModelConfig
from megatron_moe.model.core_attention import AttentionSettings, CoreAttention, attention_product
from megatron_moe.model.norm import Norm, ProjectionNorm
from megatron_moe.model.rotary import Rotary
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.linear import ColumnParallelLinear, enter_tp
from megatron_moe.parallel.sharding import Initial
from megatron_moe.parallel.tokens import TokenBatch


class Attention(CoreAttention):
    """Causal self-attention of one layer."""

    def __init__(
        self, config: ModelConfig, ctx: ParallelContext, dtype: torch.dtype, settings: AttentionSettings
    ) -> None:
        heads, groups, channels, tp = config.num_attention_heads, config.query_groups, config.head_channels, ctx.tp.size
        super().__init__(config, ctx, dtype, settings, scale=channels**-0.5, value_channels=channels)
        product = attention_product(config, ctx, dtype)
        self.channels = channels
        self.kv_whole = groups < tp
        first_group = ctx.tp.rank * groups // tp
        self.kv_rows = slice(first_group * channels, (first_group + 1) * channels) if self.kv_whole else None

        def column(num_heads: int, cut: int | None) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                (num_heads * channels, config.hidden_size),
                ctx,
                dtype,
                cut=cut,
                bias=config.add_bias_linear or config.add_qkv_bias,
                initial=Initial("normal", config.init_method_std),
                queue=settings.queue,
                product=product,
            )

        self.query = column(heads, 0)
        self.key = column(groups, None if self.kv_whole else 0)
        self.value = column(groups, None if self.kv_whole else 0)
        self.query_norm: Norm | ProjectionNorm | None = None
        self.key_norm: Norm | ProjectionNorm | None = None
        self.normalises_projection = config.qk_layernorm_scope == "projection"
        if config.qk_layernorm and self.normalises_projection:
            self.query_norm = ProjectionNorm(heads * channels, config, ctx, dtype, cut=True)
            self.key_norm = ProjectionNorm(groups * channels, config, ctx, dtype, cut=not self.kv_whole)
        elif config.qk_layernorm:
            # Every tp rank normalises its own heads with the one weight: its gradient is partial over tp.
            epsilon = config.qk_norm_epsilon
            self.query_norm = Norm(channels, config, ctx, dtype, partial_tp=True, epsilon=epsilon)
            self.key_norm = Norm(channels, config, ctx, dtype, partial_tp=True, epsilon=epsilon)
        self.rotary = None
        if config.position_embedding_type == "rope":
            self.rotary = Rotary(channels, config.rotary_percent, config, ctx.device)

    def forward(self, x_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """x [S', B, D], normalised rows of the residual stream -> [S', B, D]."""
        x_SBD = enter_tp(x_SBD, self.ctx, self.sequence_parallel)
        q_SBHC, k_SBGC = self._normalised(x_SBD)
        v_SBGC = self.value(x_SBD, self.kv_rows).unflatten(-1, (-1, self.channels))
        if self.rotary is not None:
            tables = self.rotary.tables(tokens.context(tokens.positions_SB), x_SBD.dtype)
            q_SBHC, k_SBGC = self.rotary.rotate(q_SBHC, tables), self.rotary.rotate(k_SBGC, tables)
        k_SBGC, v_SBGC = self.remembered(k_SBGC, v_SBGC)
        return self.attend(q_SBHC, k_SBGC, v_SBGC, tokens)

    def _normalised(self, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [S, B, H, C] and keys [S, B, G, C] of this rank's heads."""
        heads = (-1, self.channels)
        if self.query_norm is None or self.key_norm is None:
            return self.query(x_SBD).unflatten(-1, heads), self.key(x_SBD, self.kv_rows).unflatten(-1, heads)
        if self.normalises_projection:  # over all heads, also those that this rank does not use
            k_SBA = self.key_norm(self.key(x_SBD))
            k_SBA = k_SBA if self.kv_rows is None else k_SBA[..., self.kv_rows]
            return self.query_norm(self.query(x_SBD)).unflatten(-1, heads), k_SBA.unflatten(-1, heads)
        q_SBHC = self.query_norm(self.query(x_SBD).unflatten(-1, heads))
        return q_SBHC, self.key_norm(self.key(x_SBD, self.kv_rows).unflatten(-1, heads))
