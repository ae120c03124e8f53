"""DeepSeek: the 16B mixture, V2 (latent attention), V3 (sigmoids, bias of the choice, multi-token prediction)."""

from megatron_moe.config.schema import Config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.family import Family
from megatron_moe.convert.fields import Between, Fixed, Implied, Ours, Part, Theirs, key
from megatron_moe.convert.parts import (
    DECODER,
    DENSE_WIDTH,
    EXPERT_WIDTH,
    TOPK,
    expert_groups,
    first_dense,
    implied_head_dim,
    kv_heads,
    prediction_modules,
    shared_experts,
    softmax_weights,
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
    in_layers,
    in_layers_and_modules,
    latent_attention,
    norms,
    prediction_module,
    shared_expert,
)


def _latent(query_default: int | None) -> tuple[Part, ...]:
    """Sizes of latent attention; the latents' norms have an epsilon of their own, always 1e-6 in their code."""

    def derived(config: Config) -> Ours:
        model = config.model
        return {
            "num_key_value_heads": model.num_attention_heads,
            "qk_head_dim": model.qk_head_dim + model.qk_pos_emb_head_dim,
            "head_dim": model.qk_pos_emb_head_dim,
        }

    return (
        Implied("multi_latent_attention", True),
        Implied("qk_layernorm", True),
        Implied("qk_layernorm_epsilon", 1e-6),
        Implied("rotary_interleaved", True),
        key("q_lora_rank", "q_lora_rank", query_default),
        key("kv_lora_rank", "kv_lora_rank", 512),
        key("qk_nope_head_dim", "qk_head_dim", 128),
        key("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
        key("v_head_dim", "v_head_dim", 128),
        Between(("num_key_value_heads", "qk_head_dim", "head_dim"), lambda theirs: {}, derived),
        Fixed("attention_bias", False),
    )


_COMMON: tuple[Part, ...] = (
    *DECODER,
    key("rms_norm_eps", "norm_epsilon", 1e-6),
    rope(1e4),
    tied(),
    DENSE_WIDTH,
    *TOPK,
    EXPERT_WIDTH,
)


def _v2_method() -> Part:
    """``topk_method``: best experts of all, or of the groups with the best single experts."""

    def read(theirs: Theirs) -> Ours:
        method = theirs.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ConversionError(f"config.json has topk_method {method!r}; greedy and group_limited_greedy are known.")
        limits = expert_groups(None, None).read(theirs)
        return limits if method == "group_limited_greedy" else dict.fromkeys(limits)

    def write(config: Config) -> Ours:
        limited = config.moe.moe_router_num_groups is not None
        return expert_groups(None, None).write(config) | {
            "topk_method": "group_limited_greedy" if limited else "greedy"
        }

    return Between(("topk_method", "n_group", "topk_group"), read, write)


DEEPSEEK = Family(
    model_type="deepseek",
    architecture="DeepseekForCausalLM",
    remote_code=True,
    parts=(
        *_COMMON,
        kv_heads(),
        implied_head_dim(),
        Fixed("attention_bias", False),
        Implied("qk_layernorm", False),
        key("n_routed_experts", "num_experts"),
        key("num_experts_per_tok", "moe_router_topk"),
        shared_experts(0),
        first_dense(0, has_frequency=True),
        *softmax_weights(False),
        Fixed("scoring_func", "softmax"),
    ),
    rules=(
        *ENDS,
        *in_layers(norms, grouped_attention, feed_forward, experts, shared_expert("shared_experts")),
    ),
)

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    parts=(
        *_COMMON,
        *_latent(1536),
        key("n_routed_experts", "num_experts", 64),
        key("num_experts_per_tok", "moe_router_topk"),
        shared_experts(2),
        first_dense(0, has_frequency=True),
        Implied("moe_router_score_function", "softmax"),
        Implied("moe_router_pre_softmax", True),
        Fixed(
            "norm_topk_prob", False, also=(None,)
        ),  # transformers ignores it, their own code divides instead of scaling
        key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
        _v2_method(),
        Fixed("scoring_func", "softmax"),
        Fixed("mlp_bias", False),
    ),
    rules=(
        *ENDS,
        *in_layers(norms, latent_attention, feed_forward, experts, shared_expert("shared_experts")),
    ),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    parts=(
        *_COMMON,
        *_latent(1536),
        key("n_routed_experts num_local_experts", "num_experts", 256),
        key("num_experts_per_tok", "moe_router_topk", 8),
        shared_experts(1),
        first_dense(3, has_frequency=True),
        Implied("moe_router_score_function", "sigmoid"),
        Implied("moe_router_enable_expert_bias", True),
        Fixed("norm_topk_prob", True),
        key("routed_scaling_factor", "moe_router_topk_scaling_factor", 2.5),
        expert_groups(8, 4),
        Fixed("topk_method", "noaux_tc"),
        Fixed("scoring_func", "sigmoid"),
        Fixed("rope_interleave", True),
        prediction_modules(1),
    ),
    rules=(
        *ENDS,
        *in_layers_and_modules(
            norms, latent_attention, feed_forward, experts, correction_bias, shared_expert("shared_experts")
        ),
        *prediction_module(),
    ),
    copies=PREDICTION_COPIES,
)
