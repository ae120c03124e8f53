"""One transformer layer: attention and feed-forward (dense or MoE), each behind a norm and beside the residual."""

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_moe.config.schema import Config
from megatron_moe.model.attention import Attention
from megatron_moe.model.feed_forward import FeedForward, SharedExpert
from megatron_moe.model.norm import Norm
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tokens import TokenBatch
from megatron_moe.parallel.weight_gradients import WeightGradientQueue


class Block(nn.Module):
    """Layer ``layer_id`` of the whole model."""

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
        model, moe = config.model, config.moe
        self.layer_id, self.dropout = layer_id, model.hidden_dropout
        self.recompute = config.training
        sequence_parallel = config.parallel.sequence_parallel
        common = {
            "sequence_parallel": sequence_parallel,
            "output_std": model.init_method_std / math.sqrt(2 * model.num_layers),
            "queue": queue,
        }
        self.attention_norm = Norm(model.hidden_size, model, ctx, dtype, partial_tp=sequence_parallel)
        self.attention = Attention(model, ctx, dtype, **common)
        self.feed_forward_norm = Norm(model.hidden_size, model, ctx, dtype, partial_tp=sequence_parallel)
        self.feed_forward: FeedForward | None = None
        self.moe: MoELayer | None = None
        if is_moe:
            width, gated = moe.moe_shared_expert_intermediate_size, moe.moe_shared_expert_gate
            shared = SharedExpert(width, gated, model, ctx, dtype, **common) if width else None
            self.moe = MoELayer(
                model,
                moe,
                layer_id,
                ctx,
                dtype,
                output_std=common["output_std"],
                shared_expert=shared,
                queue=queue,
            )
        else:
            self.feed_forward = FeedForward(
                model.dense_ffn_size, model, ctx, dtype, bias=model.add_bias_linear, **common
            )

    def forward(self, x_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """x [S', B, D] -> [S', B, D]."""
        if self._recomputes("full"):
            return _recomputed(self._forward, x_SBD, tokens)
        return self._forward(x_SBD, tokens)

    def _forward(self, x_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        y_SBD = self._call("core_attn", self.attention, self.attention_norm(x_SBD), tokens)
        x_SBD = x_SBD + self._drop(y_SBD, tokens, "attention dropout")
        normed_SBD = self.feed_forward_norm(x_SBD)
        if self.moe is not None:
            y_SBD = self._call("moe", self.moe, normed_SBD, tokens)
        else:
            assert self.feed_forward is not None
            y_SBD = self._call("mlp", self.feed_forward, normed_SBD)
        return x_SBD + self._drop(y_SBD, tokens, "feed-forward dropout")

    def _recomputes(self, what: str) -> bool:
        if not (self.training and torch.is_grad_enabled()):
            return False
        if what == "full":
            return self.recompute.recompute_granularity == "full"
        return self.recompute.recompute_granularity == "selective" and what in self.recompute.recompute_modules

    def _call(self, name: str, module: nn.Module, *inputs: object) -> Tensor:
        return _recomputed(module, *inputs) if self._recomputes(name) else module(*inputs)

    def _drop(self, y_SBD: Tensor, tokens: TokenBatch, use: str) -> Tensor:
        """Dropout by numbers that belong to the token: the same under every layout."""
        if self.dropout == 0.0 or not tokens.step.training:
            return y_SBD
        index_SB = tokens.local(tokens.index_SB)
        uniform_SBD = tokens.uniform(index_SB, self.layer_id, use, y_SBD.shape[-1], torch.float32)
        return y_SBD * ((uniform_SBD >= self.dropout) / (1.0 - self.dropout)).to(y_SBD.dtype)


def _recomputed(function: object, *inputs: object) -> Tensor:
    """Keep the inputs only and compute again in the backward pass. No generator state: numbers are counter-based."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]
