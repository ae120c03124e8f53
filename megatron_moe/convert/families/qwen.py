"""Qwen's mixtures: Qwen2-MoE (biases, a gated shared expert) and Qwen3-MoE (norms of queries and keys, wide heads)."""

from megatron_moe.convert.family import Family
from megatron_moe.convert.fields import Fixed, Implied, key
from megatron_moe.convert.parts import (
    DECODER,
    DENSE_WIDTH,
    EXPERT_WIDTH,
    TOPK,
    head_dim,
    implied_head_dim,
    kv_heads,
    softmax_weights,
    sparse_step,
    tied,
)
from megatron_moe.convert.positions import no_window, rope
from megatron_moe.convert.table import Rule, one
from megatron_moe.convert.tables import (
    ENDS,
    OURS,
    THEIRS,
    experts,
    feed_forward,
    grouped_attention,
    in_layers,
    norms,
    shared_expert,
)

_COMMON = (
    *DECODER,
    key("rms_norm_eps", "norm_epsilon", 1e-6),
    rope(1e4),
    no_window(),
    tied(),
    DENSE_WIDTH,
    *TOPK,
    EXPERT_WIDTH,
    sparse_step(),
    *softmax_weights(False),
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    parts=(
        *_COMMON,
        kv_heads(16),
        implied_head_dim(),
        key("qkv_bias", "add_qkv_bias", True),
        Implied("qk_layernorm", False),
        key("num_experts", "num_experts", 60),
        key("num_experts_per_tok", "moe_router_topk", 4),
        key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 5632),
        Implied("moe_shared_expert_gate", True),
    ),
    rules=(
        *ENDS,
        *in_layers(norms, grouped_attention, feed_forward, experts, shared_expert("shared_expert")),
        Rule(OURS + "moe.shared_expert.gate_weight", one(THEIRS + "mlp.shared_expert_gate.weight")),
    ),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parts=(
        *_COMMON,
        kv_heads(4),
        head_dim(),
        Fixed("attention_bias", False),
        Implied("qk_layernorm", True),
        key("num_experts num_local_experts", "num_experts", 128),
        key("num_experts_per_tok", "moe_router_topk", 8),
    ),
    rules=(*ENDS, *in_layers(norms, grouped_attention, feed_forward, experts)),
)
