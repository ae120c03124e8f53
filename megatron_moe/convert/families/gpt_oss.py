"""GPT-OSS: biases everywhere, sinks, a window in every second layer, clamped activations; experts are transposed."""

from megatron_moe.convert.family import Family
from megatron_moe.convert.fields import Fixed, Implied, key
from megatron_moe.convert.parts import DECODER, TOPK, every_layer, head_dim, kv_heads, softmax_weights, tied
from megatron_moe.convert.positions import rope, window_by_layer
from megatron_moe.convert.table import ALTERNATING, TRANSPOSED, TRANSPOSED_ALTERNATING, Rule, fused, one
from megatron_moe.convert.tables import ENDS, OURS, THEIRS, grouped_attention, in_layers, norms

_ROUTER, _EXPERTS = THEIRS + "mlp.router.", THEIRS + "mlp.experts."

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    parts=(
        *(part for part in DECODER if part != Implied("activation", "swiglu")),
        kv_heads(8),
        head_dim(64),
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        rope(150000.0),
        window_by_layer(),
        tied(),
        Fixed("attention_bias", True),
        Implied("add_bias_linear", True),
        Implied("softmax_type", "learnable"),
        Implied("qk_layernorm", False),
        Implied("activation", "quick_geglu"),
        Implied("glu_linear_offset", 1.0),
        Fixed("swiglu_alpha", 1.702),
        key("swiglu_limit", "activation_func_clamp_value", 7.0),
        *TOPK,
        every_layer(),
        key("num_local_experts num_experts", "num_experts", 128),
        key("num_experts_per_tok experts_per_token", "moe_router_topk", 4),
        key("intermediate_size", "moe_ffn_hidden_size", 2880),
        *softmax_weights(None),
    ),
    rules=(
        *ENDS,
        *in_layers(norms, grouped_attention),
        Rule(OURS + "moe.gate.weight", one(_ROUTER + "weight")),
        Rule(OURS + "moe.gate.logit_bias", one(_ROUTER + "bias")),
        Rule(OURS + "moe.experts.fc1", fused(_EXPERTS + "gate_up_proj", TRANSPOSED_ALTERNATING)),
        Rule(OURS + "moe.experts.fc1_bias", fused(_EXPERTS + "gate_up_proj_bias", ALTERNATING)),
        Rule(OURS + "moe.experts.fc2", fused(_EXPERTS + "down_proj", TRANSPOSED)),
        Rule(OURS + "moe.experts.fc2_bias", fused(_EXPERTS + "down_proj_bias")),
    ),
    neutral=frozenset({"initial_context_length"}),
)
