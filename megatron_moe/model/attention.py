"""Grouped-query attention: heads cut over tp, the sequence over cp.

    x [S', B, D] --gather S (tp)--> query, key, value (heads / tp) --rotary--> core --> output --scatter S--> [S', B, D]

Key-value heads fewer than tp: their projections are whole on every rank, which uses the heads its queries need.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from megatron_moe.config.schema import ModelConfig
from megatron_moe.model.norm import Norm
from megatron_moe.model.recompute import recomputed
from megatron_moe.model.ring_attention import ring_attention
from megatron_moe.model.rotary import Rotary
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.linear import ColumnParallelLinear, RowParallelLinear, enter_tp
from megatron_moe.parallel.sharding import Initial
from megatron_moe.parallel.tokens import TokenBatch, context_chunks
from megatron_moe.parallel.weight_gradients import WeightGradientQueue


class Attention(nn.Module):
    """Causal self-attention of one layer.

    Args:
        cp_comm_type: how queries meet the keys of other context-parallel ranks: ``allgather``, or ``p2p`` in a ring.
        recompute_core: keep query, key and value alone of scores, softmax and weighted values.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        sequence_parallel: bool,
        output_std: float,
        cp_comm_type: str = "allgather",
        recompute_core: bool = False,
        queue: WeightGradientQueue | None = None,
    ) -> None:
        super().__init__()
        self.ctx, self.sequence_parallel = ctx, sequence_parallel
        self.ring, self.recompute_core = cp_comm_type == "p2p" and ctx.cp.size > 1, recompute_core
        heads, groups, channels, tp = config.num_attention_heads, config.query_groups, config.head_channels, ctx.tp.size
        self.channels = channels
        self.local_heads = heads // tp
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
                queue=queue,
            )

        self.query = column(heads, 0)
        self.key = column(groups, None if self.kv_whole else 0)
        self.value = column(groups, None if self.kv_whole else 0)
        self.output = RowParallelLinear(
            heads * channels,
            config.hidden_size,
            ctx,
            dtype,
            sequence_parallel=sequence_parallel,
            bias=config.add_bias_linear,
            initial=Initial("normal", output_std),
            queue=queue,
        )
        # Every tp rank normalises its own heads with the one weight: its gradient is partial over tp.
        self.query_norm = Norm(channels, config, ctx, dtype, partial_tp=True) if config.qk_layernorm else None
        self.key_norm = Norm(channels, config, ctx, dtype, partial_tp=True) if config.qk_layernorm else None
        self.rotary = None
        if config.position_embedding_type == "rope":
            self.rotary = Rotary(channels, config.rotary_percent, config.rotary_base, ctx.device)

    def forward(self, x_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """x [S', B, D], normalised rows of the residual stream -> [S', B, D]."""
        x_SBD = enter_tp(x_SBD, self.ctx, self.sequence_parallel)
        q_SBHC = self.query(x_SBD).unflatten(-1, (-1, self.channels))
        k_SBGC = self.key(x_SBD, self.kv_rows).unflatten(-1, (-1, self.channels))
        v_SBGC = self.value(x_SBD, self.kv_rows).unflatten(-1, (-1, self.channels))
        if self.query_norm is not None and self.key_norm is not None:
            q_SBHC, k_SBGC = self.query_norm(q_SBHC), self.key_norm(k_SBGC)
        if self.rotary is not None:
            tables = self.rotary.tables(tokens.context(tokens.positions_SB), x_SBD.dtype)
            q_SBHC, k_SBGC = self.rotary.rotate(q_SBHC, tables), self.rotary.rotate(k_SBGC, tables)
        if self.recompute_core:
            y_SBHC = recomputed(self.core, q_SBHC, k_SBGC, v_SBGC, tokens)
        else:
            y_SBHC = self.core(q_SBHC, k_SBGC, v_SBGC, tokens)
        return self.output(y_SBHC.flatten(2))

    def core(self, q_SBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, tokens: TokenBatch) -> Tensor:
        """Scores and weighted values: q [S/cp, B, H, C] against the keys and values of the whole sequence."""
        cp, seq_length = self.ctx.cp, tokens.layout.seq_length
        if self.ring:
            return ring_attention(q_SBHC, k_SBGC, v_SBGC, tokens, cp)
        if cp.size == 1:
            return attend(q_SBHC, k_SBGC, v_SBGC, tokens.documents_SB)
        kv = tokens.layout.gather_context(torch.cat([k_SBGC, v_SBGC], -1))
        k_SBGC, v_SBGC = kv.split([k_SBGC.shape[-1], v_SBGC.shape[-1]], -1)
        parts = []
        for q_cBHC, chunk in zip(q_SBHC.chunk(2), context_chunks(cp.rank, cp.size), strict=True):
            end = (chunk + 1) * seq_length // (2 * cp.size)  # later keys are seen by none of these queries
            documents_SB = None if tokens.documents_SB is None else tokens.documents_SB[:end]
            parts.append(attend(q_cBHC, k_SBGC[:end], v_SBGC[:end], documents_SB))
        return torch.cat(parts)


def attend(q_QBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, documents_SB: Tensor | None) -> Tensor:
    """Causal attention of the last Q positions over S >= Q keys: [Q, B, H, C'].

    Args:
        documents_SB: documents of the keys, where attention stays inside one; None where it may cross.
    """
    num_queries, num_keys = q_QBHC.shape[0], k_SBGC.shape[0]
    mask = None
    if documents_SB is not None:
        same_BQS = documents_SB[num_keys - num_queries :].T.unsqueeze(2) == documents_SB.T.unsqueeze(1)
        mask = same_BQS.tril(num_keys - num_queries).unsqueeze(1)
    elif num_queries < num_keys:
        mask = causal_lower_right(num_queries, num_keys)
    y_BHQC = F.scaled_dot_product_attention(
        q_QBHC.permute(1, 2, 0, 3),
        k_SBGC.permute(1, 2, 0, 3),
        v_SBGC.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q_QBHC.shape[2] != k_SBGC.shape[2],
    )
    return y_BHQC.permute(2, 0, 1, 3)
