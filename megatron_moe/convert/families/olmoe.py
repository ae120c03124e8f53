"""OLMoE: queries and keys are normalised as whole vectors, before they are heads; weights are not renormalised."""

from megatron_moe.convert.family import Family
from megatron_moe.convert.fields import Fixed, Implied, key
from megatron_moe.convert.parts import DECODER, TOPK, every_layer, implied_head_dim, kv_heads, softmax_weights, tied
from megatron_moe.convert.positions import rope
from megatron_moe.convert.tables import ENDS, experts, grouped_attention, in_layers, norms

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    parts=(
        *DECODER,
        kv_heads(),
        implied_head_dim(),
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        rope(1e4),
        tied(),
        Fixed("attention_bias", False),
        Fixed("clip_qkv", None),
        Implied("qk_layernorm", True),
        Implied("qk_layernorm_scope", "projection"),
        *TOPK,
        every_layer(),
        key("num_experts num_local_experts", "num_experts", 64),
        key("num_experts_per_tok", "moe_router_topk", 8),
        key("intermediate_size", "moe_ffn_hidden_size"),
        *softmax_weights(False),
    ),
    rules=(*ENDS, *in_layers(norms, grouped_attention, experts)),
)
