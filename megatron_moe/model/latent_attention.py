"""Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values of all heads from one latent per token.

    x [S', B, D] -> query_down -> norm -> gather S (tp) -> query_up -> per head: N channels, R channels to rotate
                -> kv_down --> L channels -> norm -> gather S -> kv_up -> per head: key of N, value of O channels
                         \\---> R channels, rotated: the rest of the key, one for all heads

Down projections are whole on every rank and see the tokens of the residual stream; only latents are gathered, which are
shorter than x. Up projections are cut by heads.

A single query, as in each step of generation, meets the latents themselves (section 2.1.2): key . query = latent .
(kv_up key rows^T query), and a weighted sum of values is kv_up of one of latents. So kv_up is absorbed into queries and
results, and nothing of a head is made for the tokens before.
"""

import torch
from torch import Tensor

from megatron_moe.config.schema import ModelConfig
from megatron_moe.kernels.forgetting import without_keeping
from megatron_moe.model.core_attention import AttentionSettings, Cache, CoreAttention, attention_product
from megatron_moe.model.norm import Norm
from megatron_moe.model.recompute import recomputed
from megatron_moe.model.rotary import Rotary, yarn_mscale
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.linear import ColumnParallelLinear, ReplicatedLinear, enter_tp
from megatron_moe.parallel.sharding import Initial
from megatron_moe.parallel.tokens import TokenBatch


def softmax_scale(config: ModelConfig) -> float:
    """Factor of the scores: channels^-1/2, times what YaRN adds for longer sequences (DeepSeek's code)."""
    scale = (config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5
    if config.rope_type == "yarn":
        scale *= yarn_mscale(config.rotary_scaling_factor, config.mscale_all_dim) ** 2
    return scale


class LatentAttention(CoreAttention):
    """Causal self-attention of one layer through latents."""

    def __init__(
        self, config: ModelConfig, ctx: ParallelContext, dtype: torch.dtype, settings: AttentionSettings
    ) -> None:
        value, rope = config.v_head_dim, config.qk_pos_emb_head_dim
        super().__init__(config, ctx, dtype, settings, scale=softmax_scale(config), value_channels=value)
        self.key_channels, self.rope_channels, self.value_channels = config.qk_head_dim, rope, value
        self.kv_rank, self.recompute_up = config.kv_lora_rank, settings.recompute_up_projection
        heads, query = config.num_attention_heads, config.qk_head_dim + rope
        product = attention_product(config, ctx, dtype)
        common = {"initial": Initial("normal", config.init_method_std), "queue": settings.queue, "product": product}

        def down(rows: int) -> ReplicatedLinear:
            bias, partial_tp = config.add_bias_linear or config.add_qkv_bias, settings.sequence_parallel
            return ReplicatedLinear((rows, config.hidden_size), ctx, dtype, partial_tp=partial_tp, bias=bias, **common)

        def norm(size: int) -> Norm | None:
            if not config.qk_layernorm:
                return None
            epsilon, partial_tp = config.qk_norm_epsilon, settings.sequence_parallel
            return Norm(size, config, ctx, dtype, partial_tp=partial_tp, epsilon=epsilon)

        self.query: ColumnParallelLinear | None = None
        self.query_down: ReplicatedLinear | None = None
        if config.q_lora_rank is None:
            self.query = ColumnParallelLinear((heads * query, config.hidden_size), ctx, dtype, **common)
        else:
            self.query_down, self.query_down_norm = down(config.q_lora_rank), norm(config.q_lora_rank)
            self.query_up = ColumnParallelLinear((heads * query, config.q_lora_rank), ctx, dtype, **common)
        self.kv_down, self.kv_down_norm = down(self.kv_rank + rope), norm(self.kv_rank)
        rows = heads * (self.key_channels + value)
        self.kv_up = ColumnParallelLinear((rows, self.kv_rank), ctx, dtype, **common)
        self.rotary = None
        if config.position_embedding_type == "rope":
            self.rotary = Rotary(rope, 1.0, config, ctx.device)

    def forward(self, x_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """x [S', B, D], normalised rows of the residual stream -> [S', B, D]."""
        q_SBX = self._query_source(x_SBD)
        latent_SBL, k_SBR = self.kv_down(x_SBD).split([self.kv_rank, self.rope_channels], -1)
        if self.kv_down_norm is not None:
            latent_SBL = self.kv_down_norm(latent_SBL)
        latent_SBC = enter_tp(torch.cat([latent_SBL, k_SBR], -1), self.ctx, self.sequence_parallel)
        tables: tuple[Tensor, Tensor] | None = None
        if self.rotary is not None:
            tables = self.rotary.tables(tokens.context(tokens.positions_SB), x_SBD.dtype)
        if self.cache is not None:
            return self._after_others(*self._rotated(q_SBX, latent_SBC, tables), tokens, self.cache)

        def heads(q_SBX: Tensor, latent_SBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._heads(*self._rotated(q_SBX, latent_SBC, tables))

        def attended(q_SBX: Tensor, latent_SBC: Tensor) -> Tensor:
            return self.core(*heads(q_SBX, latent_SBC), tokens)

        if self.recompute_up and self.recompute_core:  # together: queries, keys and values are not even inputs
            return self.output(recomputed(attended, q_SBX, latent_SBC).flatten(2))
        if self.recompute_up:
            return without_keeping(heads, lambda q, k, v: self.attend(q, k, v, tokens), q_SBX, latent_SBC)
        return self.attend(*heads(q_SBX, latent_SBC), tokens)

    def _rotated(
        self, q_SBX: Tensor, latent_SBC: Tensor, tables: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries in two parts [S, B, H, N], [S, B, H, R]; latents [S, B, L]; the key's rotated part [S, B, 1, R]."""
        q_SBA = q_SBX if self.query_down is None else self.query_up(q_SBX)
        q_SBHC = q_SBA.unflatten(-1, (-1, self.key_channels + self.rope_channels))
        q_SBHN, q_SBHR = q_SBHC.split([self.key_channels, self.rope_channels], -1)
        latent_SBL, k_SBR = latent_SBC.split([self.kv_rank, self.rope_channels], -1)
        k_SB1R = k_SBR.unsqueeze(2)
        if self.rotary is not None and tables is not None:
            q_SBHR, k_SB1R = self.rotary.rotate(q_SBHR, tables), self.rotary.rotate(k_SB1R, tables)
        return q_SBHN, q_SBHR, latent_SBL, k_SB1R

    def _heads(
        self, q_SBHN: Tensor, q_SBHR: Tensor, latent_SBL: Tensor, k_SB1R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads."""
        kv_SBHC = self.kv_up(latent_SBL).unflatten(-1, (-1, self.key_channels + self.value_channels))
        k_SBHN, v_SBHO = kv_SBHC.split([self.key_channels, self.value_channels], -1)
        k_SBHR = k_SB1R.expand(-1, -1, k_SBHN.shape[2], -1)
        return torch.cat([q_SBHN, q_SBHR], -1), torch.cat([k_SBHN, k_SBHR], -1), v_SBHO

    def _after_others(
        self, q_SBHN: Tensor, q_SBHR: Tensor, latent_SBL: Tensor, k_SB1R: Tensor, tokens: TokenBatch, cache: Cache
    ) -> Tensor:
        """In generation: tokens that see those of earlier calls."""
        (latents_SBC,) = cache.extend(torch.cat([latent_SBL, k_SB1R.squeeze(2)], -1))
        if len(q_SBHN) == 1:
            return self._absorbed(q_SBHN, q_SBHR, latents_SBC, tokens)
        latent_SBL, k_SB1R = latents_SBC[..., : self.kv_rank], latents_SBC[..., None, self.kv_rank :]
        return self.attend(*self._heads(q_SBHN, q_SBHR, latent_SBL, k_SB1R), tokens)

    def _absorbed(self, q_1BHN: Tensor, q_1BHR: Tensor, latents_SBC: Tensor, tokens: TokenBatch) -> Tensor:
        """The same of one query and latents [S, B, L + R] of all tokens, which are the keys and values of one head."""
        up_HCL = self.kv_up.weight.unflatten(0, (-1, self.key_channels + self.value_channels))
        up_HNL, up_HOL = up_HCL.split([self.key_channels, self.value_channels], 1)
        q_1BHL = torch.einsum("sbhn,hnl->sbhl", q_1BHN, up_HNL)
        keys_SB1C = latents_SBC.unsqueeze(2)
        y_1BHL = self.core(torch.cat([q_1BHL, q_1BHR], -1), keys_SB1C, keys_SB1C[..., : self.kv_rank], tokens)
        return self.output(torch.einsum("sbhl,hol->sbho", y_1BHL, up_HOL).flatten(2))

    def _query_source(self, x_SBD: Tensor) -> Tensor:
        """What queries are made of: their latent [S, B, Q], or, without one, themselves [S, B, rows of the heads]."""
        if self.query_down is None:
            assert self.query is not None
            return self.query(enter_tp(x_SBD, self.ctx, self.sequence_parallel))
        latent_SBQ = self.query_down(x_SBD)
        if self.query_down_norm is not None:
            latent_SBQ = self.query_down_norm(latent_SBQ)
        return enter_tp(latent_SBQ, self.ctx, self.sequence_parallel)
