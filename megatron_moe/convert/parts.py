"""Parts of configurations that several families share: sizes, which layers are MoE, routing."""

from typing import Any

from megatron_moe.config.schema import Config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.fields import Between, Fixed, Implied, Ours, Part, Theirs, key, negated, value_in
from megatron_moe.convert.positions import pattern_text

DECODER: tuple[Part, ...] = (
    key("num_hidden_layers", "num_layers"),
    key("hidden_size", "hidden_size"),
    key("vocab_size", "vocab_size"),
    key("num_attention_heads", "num_attention_heads"),
    Fixed("hidden_act", "silu", also=("swish",)),
    Fixed("attention_dropout", 0.0, also=(None, 0)),
    Implied("activation", "swiglu"),
    Implied("normalization", "RMSNorm"),
)
"""What all families say alike."""


def tied(default: bool = False) -> Part:
    """Whether the output layer is the embedding."""
    return negated("tie_word_embeddings", "untie_embeddings_and_output_weights", default)


def kv_heads(default: Any = None) -> Part:
    """Key-value heads; null is one per query head."""

    def read(theirs: Theirs) -> Ours:
        groups = value_in(theirs, ("num_key_value_heads",), default)
        return {"num_query_groups": theirs.get("num_attention_heads") if groups is None else groups}

    return Between(("num_key_value_heads",), read, lambda config: {"num_key_value_heads": config.model.query_groups})


def head_dim(default: int | None = None) -> Part:
    """Channels of a head; null is hidden size / heads."""

    def read(theirs: Theirs) -> Ours:
        channels = value_in(theirs, ("head_dim",), default)
        return {"kv_channels": theirs["hidden_size"] // theirs["num_attention_heads"] if channels is None else channels}

    return Between(("head_dim",), read, lambda config: {"head_dim": config.model.head_channels})


def implied_head_dim() -> Part:
    """Families without the key, whose heads share the hidden size out: another width is refused, not lost."""
    return Between(("head_dim",), head_dim().read, lambda config: {})


# --- which layers are MoE --------------------------------------------------------------------------------------------


def every_layer() -> Part:
    """All layers are MoE."""
    return Implied("moe_layer_freq", "1")


def sparse_step() -> Part:
    """Qwen: layer i is MoE if (i + 1) % decoder_sparse_step == 0 and it is not among mlp_only_layers."""

    def read(theirs: Theirs) -> Ours:
        step, dense = theirs.get("decoder_sparse_step", 1), set(theirs.get("mlp_only_layers") or ())
        if step < 1:
            raise ConversionError(f"config.json has decoder_sparse_step {step}; it must be at least 1.")
        flags = [(i + 1) % step == 0 and i not in dense for i in range(theirs["num_hidden_layers"])]
        return {"moe_layer_freq": pattern_text(flags)}

    def write(config: Config) -> Ours:
        pattern = config.moe.layer_pattern(config.model.num_layers)
        return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, is_moe in enumerate(pattern) if not is_moe]}

    return Between(("decoder_sparse_step", "mlp_only_layers"), read, write)


def first_dense(default: int, has_frequency: bool) -> Part:
    """DeepSeek, GLM: the first layers are dense. Remote code also has ``moe_layer_freq``, of which 1 alone is known."""

    def read(theirs: Theirs) -> Ours:
        if theirs.get("moe_layer_freq", 1) != 1:
            raise ConversionError(
                f"config.json has moe_layer_freq {theirs['moe_layer_freq']}; only 1 is supported here."
            )
        num_layers, dense = theirs["num_hidden_layers"], theirs.get("first_k_dense_replace", default)
        return {"moe_layer_freq": pattern_text([i >= dense for i in range(num_layers)])}

    def write(config: Config) -> Ours:
        pattern = config.moe.layer_pattern(config.model.num_layers)
        dense = pattern.index(True) if True in pattern else len(pattern)
        return {"first_k_dense_replace": dense} | ({"moe_layer_freq": 1} if has_frequency else {})

    return Between(("first_k_dense_replace", "moe_layer_freq"), read, write)


# --- experts and routing ---------------------------------------------------------------------------------------------

TOPK: tuple[Part, ...] = (Implied("moe_router", "topk"), Implied("moe_expert_capacity_factor", None))


def softmax_weights(default_normalised: bool | None) -> tuple[Part, ...]:
    """Weights of the softmax over all experts, divided by their sum: ``norm_topk_prob``; None: always divided."""
    score = Implied("moe_router_score_function", "softmax")
    if default_normalised is None:
        return (score, Implied("moe_router_pre_softmax", False))

    def read(theirs: Theirs) -> Ours:
        normalised = bool(value_in(theirs, ("norm_topk_prob",), default_normalised))
        return {"moe_router_pre_softmax": not normalised}

    def write(config: Config) -> Ours:
        moe = config.moe
        return {"norm_topk_prob": moe.moe_router_norm_topk or not moe.moe_router_pre_softmax}

    return (score, Between(("norm_topk_prob",), read, write))


def shared_experts(default: int) -> Part:
    """``n_shared_experts`` of the routed experts' width, as one feed-forward."""

    def read(theirs: Theirs) -> Ours:
        count = theirs.get("n_shared_experts", default) or 0
        return {"moe_shared_expert_intermediate_size": count * theirs["moe_intermediate_size"] or None}

    def write(config: Config) -> Ours:
        width = config.moe.moe_shared_expert_intermediate_size or 0
        return {"n_shared_experts": width // (config.moe.moe_ffn_hidden_size or config.model.dense_ffn_size)}

    return Between(("n_shared_experts",), read, write)


def expert_groups(default_groups: int | None, default_kept: int | None) -> Part:
    """``topk_group`` of ``n_group`` groups; where all are kept there are none."""

    def read(theirs: Theirs) -> Ours:
        groups, kept = theirs.get("n_group", default_groups), theirs.get("topk_group", default_kept)
        limited = groups is not None and kept is not None and kept < groups
        return {
            "moe_router_num_groups": groups if limited else None,
            "moe_router_group_topk": kept if limited else None,
        }

    def write(config: Config) -> Ours:
        return {"n_group": config.moe.moe_router_num_groups or 1, "topk_group": config.moe.moe_router_group_topk or 1}

    return Between(("n_group", "topk_group"), read, write)


def prediction_modules(default: int) -> Part:
    """Multi-token prediction: modules that are stored after the layers."""

    def read(theirs: Theirs) -> Ours:
        return {"mtp_num_layers": value_in(theirs, names, default) or None}

    def write(config: Config) -> Ours:
        return {names[0]: config.model.mtp_num_layers or 0}

    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return Between(names, read, write)


EXPERT_WIDTH: Part = key("moe_intermediate_size", "moe_ffn_hidden_size")
DENSE_WIDTH: Part = key("intermediate_size", "ffn_hidden_size")
