"""Megatron's arguments, as its checkpoints carry them, as a configuration of ours.

Most have the same name and meaning here. Of the others this file knows those that change what a trained model computes;
each either becomes a setting or must have the value at which it does nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_moe.config.schema import Config
from megatron_moe.config.settings import flag_of, settings
from megatron_moe.convert.configuration import config_of
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.positions import pattern_text

Arguments = Mapping[str, Any]

_SAME = {
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "kv_channels": None,
    "normalization": "LayerNorm",
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "softmax_type": "vanilla",
    "untie_embeddings_and_output_weights": False,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "mtp_num_layers": None,
    "num_experts": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_enable_expert_bias": False,
}
"""Arguments with the name of a setting, and Megatron's default for those that an older version did not know."""

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "apply_layernorm_1p": (None, False),
    "layernorm_zero_centered_gamma": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "openai_gelu": (None, False),
    "qk_l2_norm": (None, False),
    "qk_clip": (None, False),
    "attention_output_gate": (None, False),
    "multi_latent_attention": (None, False),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "no_rope_freq": (None,),
    "use_mup": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "mtp_use_repeated_layer": (None, False),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (None, False),
    "moe_expert_capacity_factor": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
}
"""Arguments that have no setting here, with their values that change nothing."""


def read_arguments(arguments: Arguments, vocab_size: int | None = None, ignore: Iterable[str] = ()) -> Config:
    """The model of a checkpoint; training settings have their defaults.

    Args:
        vocab_size: of the tokenizer. Megatron keeps the padded one alone where it took the size from a tokenizer.
        ignore: arguments to leave out, on the user's word that they change nothing.

    Raises:
        ConversionError: names each argument that cannot be expressed.
    """
    arguments = {name: value for name, value in arguments.items() if name not in set(ignore)}
    problems = [
        f"{flag_of(name)} {arguments[name]} changes what the model computes and is not supported here"
        for name, admitted in _WITHOUT_EFFECT.items()
        if name in arguments and arguments[name] not in admitted
    ]
    values = {name: arguments.get(name, default) for name, default in _SAME.items()}
    try:
        for part in (_sizes, _positions, _activation, _layers, _routing):
            values |= part(arguments)
    except KeyError as error:
        problems.append(f"there is no {error}")
    except ConversionError as error:
        problems.append(str(error))
    for name in _SAME:
        problem = settings()[name].choice_problem(values[name], {})
        problems += [] if problem is None else [f"{flag_of(name)}: {problem}"]
    values["vocab_size"] = vocab_size or arguments.get("vocab_size") or arguments.get("padded_vocab_size")
    if problems:
        raise ConversionError("the checkpoint's arguments: " + "; ".join(problems) + ".")
    return config_of(values, "the checkpoint's arguments give")


def _sizes(arguments: Arguments) -> dict[str, Any]:
    ffn_hidden_size = arguments["ffn_hidden_size"]
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention") else None
    length = arguments.get("seq_length") or arguments.get("max_position_embeddings")
    return {
        "ffn_hidden_size": ffn_hidden_size,
        "moe_ffn_hidden_size": arguments.get("moe_ffn_hidden_size") or ffn_hidden_size,
        "num_query_groups": groups,
        "norm_epsilon": arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)),
        **({"seq_length": length} if length else {}),
    }


def _positions(arguments: Arguments) -> dict[str, Any]:
    kind = arguments.get("position_embedding_type", "learned_absolute")
    if kind not in ("rope", "none"):
        raise ConversionError(f"--position-embedding-type {kind} is not supported here; rope and none are")
    channels = arguments.get("kv_channels") or arguments["hidden_size"] // arguments["num_attention_heads"]
    if int(channels * arguments.get("rotary_percent", 1.0)) % 2:
        raise ConversionError(
            "--rotary-percent rotates an odd number of channels, which Megatron rounds up and others down"
        )
    values: dict[str, Any] = {"position_embedding_type": kind}
    shortened = arguments.get("rotary_seq_len_interpolation_factor")
    if shortened not in (None, 1):
        values |= {"rope_type": "linear", "rotary_scaling_factor": float(shortened)}
    if arguments.get("use_rope_scaling"):  # with the numbers of Llama 3.1, which are written into Megatron's code
        if shortened not in (None, 1):
            raise ConversionError("--use-rope-scaling with --rotary-seq-len-interpolation-factor is not supported here")
        factor = float(arguments.get("rope_scaling_factor", 8.0))
        values |= {"rope_type": "llama3", "rotary_scaling_factor": factor, "original_max_position_embeddings": 8192}
    window = arguments.get("window_size")
    if window is not None:
        pattern = arguments.get("window_attn_skip_freq")
        values |= {"window_size": list(window), "window_attn_skip_freq": _pattern(pattern)}
    return values


def _activation(arguments: Arguments) -> dict[str, Any]:
    for name in ("swiglu", "quick_geglu", "squared_relu"):
        if arguments.get(name):
            return {"activation": name}
    if arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear", True):
        raise ConversionError("--bias-gelu-fusion computes gelu by its tanh approximation, which is not supported here")
    return {"activation": "gelu"}


def _layers(arguments: Arguments) -> dict[str, Any]:
    return {"moe_layer_freq": _pattern(arguments.get("moe_layer_freq", 1))}


def _pattern(value: Any) -> str | None:
    """An integer, or a list of one entry a layer."""
    if isinstance(value, (list, tuple)):
        return pattern_text([bool(entry) for entry in value])
    return None if value is None else str(value)


def _routing(arguments: Arguments) -> dict[str, Any]:
    if arguments.get("num_experts") is None:
        return {}
    score, topk = arguments.get("moe_router_score_function", "softmax"), arguments.get("moe_router_topk", 2)
    balancing = arguments.get("moe_router_load_balancing_type", "aux_loss")
    if "sinkhorn" in balancing:
        raise ConversionError("--moe-router-load-balancing-type sinkhorn, a way of routing, is not supported here")
    if score == "sigmoid" and topk == 1:
        raise ConversionError(
            "--moe-router-topk 1 with sigmoid scores, whose weight is then the score, is not supported"
        )
    values: dict[str, Any] = {
        "moe_router_topk_scaling_factor": arguments.get("moe_router_topk_scaling_factor") or 1.0,
        "moe_router_load_balancing_type": ["none"],
    }
    kept = arguments.get("moe_router_group_topk")
    if kept:
        if score == "softmax" and not arguments.get("moe_router_pre_softmax"):
            raise ConversionError("--moe-router-group-topk with a softmax after the top-k is not supported here")
        values["moe_router_group_score_topk"] = topk // kept
    return values
