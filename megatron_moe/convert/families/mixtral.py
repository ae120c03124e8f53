"""Mixtral: grouped-query attention, every layer MoE, weights of the chosen experts always divided by their sum."""

from megatron_moe.convert.family import Family
from megatron_moe.convert.fields import Fixed, Implied, key
from megatron_moe.convert.parts import DECODER, TOPK, every_layer, head_dim, kv_heads, softmax_weights, tied
from megatron_moe.convert.positions import rope, window_everywhere
from megatron_moe.convert.table import HALVES, Rule, fused, one, per_expert
from megatron_moe.convert.tables import ENDS, OURS, THEIRS, grouped_attention, in_layers, norms

_MOE, _EXPERT = THEIRS + "block_sparse_moe.", THEIRS + "block_sparse_moe.experts.{expert}."

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    parts=(
        *DECODER,
        kv_heads(8),
        head_dim(),
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        rope(1e6),
        window_everywhere(),
        tied(),
        *TOPK,
        every_layer(),
        key("num_local_experts num_experts", "num_experts", 8),
        key("num_experts_per_tok", "moe_router_topk", 2),
        key("intermediate_size", "moe_ffn_hidden_size"),
        *softmax_weights(None),
        # In their code the jitter reaches the experts too; it acts in training alone.
        Fixed("router_jitter_noise", 0.0, also=(None,)),
        Implied("qk_layernorm", False),
    ),
    rules=(
        *ENDS,
        *in_layers(norms, grouped_attention),
        Rule(OURS + "moe.gate.weight", one(_MOE + "gate.weight"), one(THEIRS + "mlp.gate.weight", newer=True)),
        Rule(
            OURS + "moe.experts.fc1",
            per_expert(_EXPERT + "w1.weight", _EXPERT + "w3.weight"),
            fused(THEIRS + "mlp.experts.gate_up_proj", HALVES),
        ),
        Rule(OURS + "moe.experts.fc2", per_expert(_EXPERT + "w2.weight"), fused(THEIRS + "mlp.experts.down_proj")),
    ),
)
