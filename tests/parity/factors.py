"""The factors of the parity matrix: axes of a layout, features of a model, and the configuration of a choice of them.

Names come from the registries and the schema, so that a new router, loss, schedule or dispatcher is in the matrix by
being there. Values are fields of the configuration; what a value needs besides is added by ``features_of``.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_moe.config.schema import Config, ParallelConfig
from megatron_moe.moe.dispatchers import DISPATCHERS
from megatron_moe.moe.losses import BALANCE_LOSSES
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.pipeline.schedules import SCHEDULES
from tests.parity.harness import BASE, SEQ_LENGTH, vary

Row = Mapping[str, str]
_CP_COMM = next(f for f in fields(ParallelConfig) if f.name == "cp_comm_type").metadata["choices"]


def _pipelines() -> dict[str, dict[str, Any]]:
    """Every schedule with two ranks, the free ones with three stages per rank too, one of them with four ranks."""
    made: dict[str, dict[str, Any]] = {"none": {}}
    for name, spec in SCHEDULES.items():
        made[name] = {"pipeline_model_parallel_size": 2, "pipeline_schedule": name}
        if spec.chunks is None:
            made[f"{name} x3"] = made[name] | {"num_virtual_stages_per_pipeline_rank": 3}
    made["zb-h1 on 4"] = made["zb-h1"] | {"pipeline_model_parallel_size": 4}
    return made


PIPELINES = _pipelines()
ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SEVERAL = ("aux_loss", "gshard", "seq_aux_loss", "global_aux_loss", "deepseek_device")


def _size(name: str, *sizes: int) -> dict[str, dict[str, Any]]:
    return {str(size): {name: size} for size in sizes}


def _losses() -> dict[str, dict[str, Any]]:
    key, coefficient = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
    made = {name: {key: (name,), coefficient: (3.0 if name == "gshard" else 0.1,)} for name in BALANCE_LOSSES}
    return made | {"several": {key: SEVERAL, coefficient: (0.1, 3.0, 0.2, 0.3, 0.05)}}


LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "tp": _size("tensor_model_parallel_size", 1, 2, 4),
    "cp": _size("context_parallel_size", 1, 2, 4),
    "dp": {str(n): {} for n in (1, 2, 4, 8)},
    "ep": _size("expert_model_parallel_size", 1, 2, 4, 8),
    "etp": _size("expert_tensor_parallel_size", 1, 2, 4),
    "pp": PIPELINES,
    "sp": {"on": {"sequence_parallel": True}, "off": {"sequence_parallel": False}},
    "zero": {str(n): {"data_parallel_sharding_strategy": name} for n, name in enumerate(ZERO)},
    "cp_comm": {name: {"cp_comm_type": name} for name in _CP_COMM},
    "dispatcher": {name: {"moe_token_dispatcher_type": name} for name in DISPATCHERS}
    | {
        "deduplicated": {"moe_dispatch_deduplicate": True},
        "in parts": {"moe_overlap_degree": 3},
        "samples in turns": {"moe_overlap_degree": 2, "moe_overlap_attention": True},
    },
    "mbs": _size("micro_batch_size", 1, 2, 4),
    "accumulation": {"1": {}, "2": {}, "4": {}, "8": {}},
}
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "router": {name: {"moe_router": name} for name in ROUTERS},
    "balance": _losses(),
    "capacity": {"none": {}, "device": {"moe_device_capacity_factor": 1.0}}
    | {
        name: {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": name}
        for name in ("probs", "position", "random")
    },
    "group": {"sequence": {}, "within": {"moe_group_size": "8"}, "pair": {"moe_group_size": str(2 * SEQ_LENGTH)}},
    "bias": {"off": {}, "on": {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.05}},
    "scores": {"softmax": {}, "sigmoid": {"moe_router_score_function": "sigmoid"}},
    "z_loss": {"off": {}, "on": {"moe_z_loss_coeff": 0.1}},
    "jitter": {"off": {}, "on": {"moe_input_jitter_eps": 0.1}},
    "shared": {
        "none": {},
        "plain": {"moe_shared_expert_intermediate_size": 16},
        "gated": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
        "residual": {"moe_shared_expert_intermediate_size": 16, "moe_residual_coefficient": True},
    },
    "skew": {"-": {}, "all to one": {"moe_router_force_skew": 8.0}, "first always": {"moe_router_force_skew": 4.0}},
    "model": {"moe": {}, "dense": {"num_experts": None}},
    "embeddings": {"tied": {}, "untied": {"untie_embeddings_and_output_weights": True}},
    "documents": {
        "joined": {},
        "positions": {"reset_position_ids": True},
        "packed": {"reset_position_ids": True, "reset_attention_mask": True},
    },
    "tokens": {"all": {}, "uneven": {"eod_mask_loss": True}, "padded": {"padded": True}},
    "recompute": {"none": {}, "full": {"recompute_granularity": "full"}}
    | {
        " ".join(modules): {"recompute_granularity": "selective", "recompute_modules": modules}
        for modules in (("core_attn",), ("mlp", "moe"), ("layernorm", "core_attn", "moe_act"))
    }
    | {"offloaded": {"cpu_offloading_num_layers": 3, "min_offloaded_tensor_size": 1}},
    "dropout": {"off": {}, "on": {"hidden_dropout": 0.1}},
    "norm": {"RMSNorm": {}, "LayerNorm": {"normalization": "LayerNorm"}},
    "qk_norm": {
        "off": {},
        "head": {"qk_layernorm": True},
        "projection": {"qk_layernorm": True, "qk_layernorm_scope": "projection"},
    },
    "linear": {"plain": {}, "biases": {"add_bias_linear": True}, "qkv biases": {"add_qkv_bias": True}},
    "activation": {
        "swiglu": {},
        "gelu": {"activation": "gelu"},
        "clamped": {"activation": "quick_geglu", "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    },
    "attention": {
        "plain": {},
        "latent": LATENT,
        "latent queries": LATENT | {"q_lora_rank": 10},
        "window": {"window_size": (3, 0), "window_attn_skip_freq": "2"},
        "sink": {"softmax_type": "learnable"},
        "off by one": {"softmax_type": "off-by-one"},
    },
    "experts": {
        "alike": {},
        "pyramid": {"num_experts": None},
        "segments": {"num_experts": 4, "moe_segmentation_factor": 2, "moe_router_topk": 1},
    },
    "prediction": {"next": {}, "two more": {"mtp_num_layers": 2}},
    "kv heads": {"4": {"num_query_groups": None}, "2": {"num_query_groups": 2}, "1": {"num_query_groups": 1}},
}
FACTORS = AXES | FEATURES


def ranks_of(row: Row) -> int:
    """World size of a row."""
    pp = PIPELINES[row["pp"]].get("pipeline_model_parallel_size", 1)
    return int(row["tp"]) * int(row["cp"]) * int(row["dp"]) * pp


def features_of(row: Row) -> dict[str, Any]:
    """Configuration fields of a row's features, with what they need."""
    features: dict[str, Any] = {}
    for name in FEATURES:
        features |= FEATURES[name][row[name]] if name in row else {}
    losses = features.get("moe_router_load_balancing_type", ())
    if row["router"] == "switch" or row.get("skew") == "all to one":
        features["moe_router_topk"] = 1
    if row.get("capacity") == "device" or any(name.startswith("deepseek_d") for name in losses):
        features["moe_router_num_groups"] = 4
    if "deepseek_comm" in losses:
        features |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    if row["router"] == "expert_choice":
        features["moe_allow_acausal_routing"] = True
    return features


def config_of(row: Row) -> tuple[Config, Config, bool]:
    """(configuration under the layout, the same for one process, whether samples are padded)."""
    features = features_of(row)
    padded = features.pop("padded", False)
    layout: dict[str, Any] = {}
    for name in AXES:
        layout |= AXES[name][row[name]]
    stages = layout.get("num_virtual_stages_per_pipeline_rank", 2) * layout.get("pipeline_model_parallel_size", 1)
    num_layers = max(4, stages)
    if row["experts"] == "pyramid" and row["model"] == "moe":
        features["moe_num_experts_per_layer"] = f"[4]+[8]*{num_layers // 2 - 1}"
    base = vary(BASE, num_layers=num_layers, **features)
    return vary(base, **layout), base, padded
