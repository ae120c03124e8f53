"""One transformer layer: attention and feed-forward (dense or MoE), each behind a norm and beside the residual."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron_moe.config.schema import Config
from megatron_moe.kernels.forgetting import without_keeping
from megatron_moe.model.attention import Attention
from megatron_moe.model.core_attention import AttentionSettings
from megatron_moe.model.feed_forward import FeedForward, SharedExpert
from megatron_moe.model.latent_attention import LatentAttention
from megatron_moe.model.norm import Norm
from megatron_moe.model.recompute import recomputed, recomputed_modules
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tokens import TokenBatch
from megatron_moe.parallel.turns import Steps, begun, finished
from megatron_moe.parallel.weight_gradients import WeightGradientQueue

T = TypeVar("T")


class Block(nn.Module):
    """Layer ``layer_id`` of the whole model; numbers above are those of multi-token prediction, like the last layer."""

    def __init__(
        self,
        config: Config,
        layer_id: int,
        is_moe: bool,
        ctx: ParallelContext,
        dtype: torch.dtype,
        queue: WeightGradientQueue | None = None,
    ) -> None:
        super().__init__()
        model = config.model
        like_layer = min(layer_id, model.num_layers - 1)
        self.layer_id, self.dropout = layer_id, model.hidden_dropout
        self.recomputes = recomputed_modules(config.training)
        sequence_parallel = config.parallel.sequence_parallel
        common = {
            "sequence_parallel": sequence_parallel,
            "output_std": model.init_method_std / math.sqrt(2 * model.num_layers),
            "queue": queue,
        }
        self.attention_norm = Norm(model.hidden_size, model, ctx, dtype, partial_tp=sequence_parallel)
        settings = AttentionSettings(
            window=model.windows[like_layer],
            cp_comm_type=config.parallel.cp_comm_type,
            recompute_core="core_attn" in self.recomputes,
            recompute_up_projection="mla_up_proj" in self.recomputes,
            **common,
        )
        attention = LatentAttention if model.multi_latent_attention else Attention
        self.attention = attention(model, ctx, dtype, settings)
        self.feed_forward_norm = Norm(model.hidden_size, model, ctx, dtype, partial_tp=sequence_parallel)
        self.feed_forward: FeedForward | None = None
        self.moe: MoELayer | None = None
        if is_moe:
            moe = config.moe.for_layer(like_layer, model.num_layers)
            width, gated = moe.moe_shared_expert_intermediate_size, moe.moe_shared_expert_gate
            recompute = "shared_experts" in self.recomputes
            shared = SharedExpert(width, gated, model, ctx, dtype, recompute=recompute, **common) if width else None
            self.moe = MoELayer(
                model,
                moe,
                layer_id,
                ctx,
                dtype,
                output_std=common["output_std"],
                shared_expert=shared,
                queue=queue,
                recompute_activation="moe_act" in self.recomputes,
            )
        else:
            self.feed_forward = FeedForward(
                model.dense_ffn_size, model, ctx, dtype, bias=model.add_bias_linear, **common
            )

    def forward(self, x_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """x [S', B, D] -> [S', B, D]."""
        if "full" in self.recomputes:
            return recomputed(lambda x_SBD: finished(self.steps(x_SBD, tokens)), x_SBD)
        return finished(self.steps(x_SBD, tokens))

    def steps(self, x_SBD: Tensor, tokens: TokenBatch) -> Steps:
        """The same as a computation that can take turns with others, where no recomputed region is around the MoE."""
        y_SBD = self._behind(self.attention_norm, lambda h_SBD: self.attention(h_SBD, tokens), x_SBD)
        x_SBD = x_SBD + self._drop(y_SBD, tokens, "attention dropout")
        y_SBD = yield from self._feed_forward(x_SBD, tokens)
        return x_SBD + self._drop(y_SBD, tokens, "feed-forward dropout")

    def _feed_forward(self, x_SBD: Tensor, tokens: TokenBatch) -> Steps:
        moe, dense, norm = self.moe, self.feed_forward, self.feed_forward_norm
        if moe is None:
            assert dense is not None
            if "mlp" in self.recomputes:  # with the norm: its input, the residual stream, is kept anyway
                return recomputed(lambda x_SBD: dense(norm(x_SBD)), x_SBD)
            return self._behind(norm, dense, x_SBD)
        if "moe" in self.recomputes:
            return recomputed(lambda x_SBD: moe(norm(x_SBD), tokens), x_SBD)
        return (yield from self._behind(norm, lambda h_SBD: begun(moe.steps(h_SBD, tokens)), x_SBD))

    def _behind(self, norm: Norm, use: Callable[[Tensor], T], x_SBD: Tensor) -> T:
        """``use(norm(x))``, kept, or kept but for the norm."""
        if "layernorm" in self.recomputes:
            return without_keeping(lambda x_SBD: (norm(x_SBD),), use, x_SBD)
        return use(norm(x_SBD))

    def _drop(self, y_SBD: Tensor, tokens: TokenBatch, use: str) -> Tensor:
        """Dropout by numbers that belong to the token: the same under every layout."""
        if self.dropout == 0.0 or not tokens.step.training:
            return y_SBD
        index_SB = tokens.local(tokens.index_SB)
        uniform_SBD = tokens.uniform(index_SB, self.layer_id, use, y_SBD.shape[-1], torch.float32)
        return y_SBD * ((uniform_SBD >= self.dropout) / (1.0 - self.dropout)).to(y_SBD.dtype)
