"""Dense decoders, to begin mixtures from (tools/upcycle.py): Llama, Qwen2, Qwen3."""

from megatron_moe.convert.family import Family
from megatron_moe.convert.fields import Fixed, Implied, Part, key
from megatron_moe.convert.parts import DECODER, DENSE_WIDTH, head_dim, implied_head_dim, kv_heads, tied
from megatron_moe.convert.positions import no_window, rope
from megatron_moe.convert.tables import ENDS, feed_forward, grouped_attention, in_layers, norms

_RULES = (*ENDS, *in_layers(norms, grouped_attention, feed_forward))
_COMMON: tuple[Part, ...] = (*DECODER, DENSE_WIDTH, rope(1e4), tied(), Implied("num_experts", None))

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parts=(
        *_COMMON,
        kv_heads(),
        head_dim(),
        key("rms_norm_eps", "norm_epsilon", 1e-6),
        Fixed("attention_bias", False),
        Fixed("mlp_bias", False),
        Implied("qk_layernorm", False),
    ),
    rules=_RULES,
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    parts=(
        *_COMMON,
        kv_heads(32),
        implied_head_dim(),
        key("rms_norm_eps", "norm_epsilon", 1e-6),
        no_window(),
        Implied("add_qkv_bias", True),
        Implied("qk_layernorm", False),
    ),
    rules=_RULES,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parts=(
        *_COMMON,
        kv_heads(32),
        head_dim(128),
        key("rms_norm_eps", "norm_epsilon", 1e-6),
        no_window(),
        Fixed("attention_bias", False),
        Implied("qk_layernorm", True),
    ),
    rules=_RULES,
)
