"""FLOPs of the model, from its configuration: one multiply-add is two FLOPs, training is three forwards."""

from dataclasses import dataclass

from megatron_moe.config.schema import Config, ModelConfig


@dataclass(frozen=True)
class ForwardFlops:
    """Forward FLOPs per token; attention's core is counted causal: half the sequence.

    Attributes:
        layers: of each layer, attention and dense or MoE feed-forward.
        head: of the output layer.
        mtp: of all modules of multi-token prediction, with the output layer that each uses once more.
    """

    layers: tuple[float, ...]
    head: float
    mtp: float

    @staticmethod
    def of(config: Config) -> "ForwardFlops":
        """From the sizes of a configuration."""
        model, moe = config.model, config.moe
        hidden, matrices = model.hidden_size, 3 if model.gated else 2
        projections, core = _attention(model)

        def feed_forward(width: int) -> float:
            return 2.0 * matrices * hidden * width

        expert = feed_forward(moe.moe_ffn_hidden_size or model.dense_ffn_size)
        shared = feed_forward(moe.moe_shared_expert_intermediate_size or 0)
        dense, routed = feed_forward(model.dense_ffn_size), expert * moe.moe_router_topk + shared
        kinds = zip(moe.experts_per_layer(model.num_layers), model.windows, strict=True)
        layers = tuple(
            projections
            + core * _seen(window, config.data.seq_length)
            + (routed + 2.0 * hidden * num_experts if num_experts else dense)
            for num_experts, window in kinds
        )
        head = 2.0 * hidden * (model.vocab_size or 0)
        mtp = (model.mtp_num_layers or 0) * (layers[-1] + 4.0 * hidden**2 + head)
        return ForwardFlops(layers, head, mtp)


def _attention(model: ModelConfig) -> tuple[float, float]:
    """FLOPs per token of the projections, and of the core per key that a token sees."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        channels = model.head_channels
        return 2.0 * hidden * channels * (2 * heads + 2 * model.query_groups), 4.0 * heads * channels
    rope, value, rank = model.qk_pos_emb_head_dim, model.v_head_dim, model.kv_lora_rank
    query = model.qk_head_dim + rope
    if model.q_lora_rank is None:
        queries = hidden * heads * query
    else:
        queries = model.q_lora_rank * (hidden + heads * query)
    keys_values = hidden * (rank + rope) + rank * heads * (model.qk_head_dim + value)
    return 2.0 * (queries + keys_values + heads * value * hidden), 2.0 * heads * (query + value)


def _seen(window: int | None, seq_length: int) -> float:
    """Keys that a token sees, in the mean: half the sequence, or the window, cut at the start of the sequence."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window**2 / (2 * seq_length)


def training_flops_per_token(config: Config) -> float:
    """Model FLOPs of forward and backward per token: no recomputation, no padding, no dropped capacity."""
    flops = ForwardFlops.of(config)
    return 3.0 * (sum(flops.layers) + flops.head + flops.mtp)
