"""FLOPs of the model, from its configuration: one multiply-add is two FLOPs, training is three forwards."""

from dataclasses import dataclass

from megatron_moe.config.schema import Config


@dataclass(frozen=True)
class ForwardFlops:
    """Forward FLOPs per token of each kind of part; attention's core is counted causal: half the sequence."""

    attention: float
    dense: float
    moe: float
    head: float

    @staticmethod
    def of(config: Config) -> "ForwardFlops":
        """Per layer (attention, dense or MoE feed-forward) and for the output layer."""
        model, moe = config.model, config.moe
        hidden, channels = model.hidden_size, model.head_channels
        projections = 2 * hidden * channels * (2 * model.num_attention_heads + 2 * model.query_groups)
        core = 2 * model.num_attention_heads * 2 * channels * config.data.seq_length / 2
        matrices = 3 if model.gated else 2

        def feed_forward(width: int) -> float:
            return 2.0 * matrices * hidden * width

        expert = feed_forward(moe.moe_ffn_hidden_size or model.dense_ffn_size)
        shared = feed_forward(moe.moe_shared_expert_intermediate_size or 0)
        router = 2.0 * hidden * (moe.num_experts or 0)
        return ForwardFlops(
            attention=projections + core,
            dense=feed_forward(model.dense_ffn_size),
            moe=expert * moe.moe_router_topk + shared + router,
            head=2.0 * hidden * (model.vocab_size or 0),
        )


def training_flops_per_token(config: Config) -> float:
    """Model FLOPs of forward and backward per token: no recomputation, no padding, no dropped capacity."""
    flops = ForwardFlops.of(config)
    pattern = config.moe.layer_pattern(config.model.num_layers)
    layers = sum(flops.attention + (flops.moe if is_moe else flops.dense) for is_moe in pattern)
    return 3.0 * (layers + flops.head)
