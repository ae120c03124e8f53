"""GLM-4.5: half of each head is rotated; routing and multi-token prediction are those of DeepSeek-V3."""

from megatron_moe.convert.family import Family
from megatron_moe.convert.fields import Fixed, Implied, key
from megatron_moe.convert.parts import (
    DECODER,
    DENSE_WIDTH,
    EXPERT_WIDTH,
    TOPK,
    expert_groups,
    first_dense,
    head_dim,
    kv_heads,
    prediction_modules,
    shared_experts,
    tied,
)
from megatron_moe.convert.positions import rope
from megatron_moe.convert.tables import (
    ENDS,
    PREDICTION_COPIES,
    correction_bias,
    experts,
    feed_forward,
    grouped_attention,
    in_layers_and_modules,
    norms,
    prediction_module,
    shared_expert,
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    parts=(
        *DECODER,
        kv_heads(8),
        head_dim(),
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        rope(1e4, percent=0.5),
        tied(),
        key("attention_bias", "add_qkv_bias", False),
        key("use_qk_norm", "qk_layernorm", False),
        DENSE_WIDTH,
        *TOPK,
        EXPERT_WIDTH,
        key("n_routed_experts num_local_experts", "num_experts", 128),
        key("num_experts_per_tok", "moe_router_topk", 8),
        shared_experts(1),
        first_dense(1, has_frequency=False),
        Implied("moe_router_score_function", "sigmoid"),
        Implied("moe_router_enable_expert_bias", True),
        Fixed("norm_topk_prob", True),
        key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
        expert_groups(1, 1),
        prediction_modules(1),
    ),
    rules=(
        *ENDS,
        *in_layers_and_modules(
            norms, grouped_attention, feed_forward, experts, correction_bias, shared_expert("shared_experts")
        ),
        *prediction_module(),
    ),
    copies=PREDICTION_COPIES,
)
