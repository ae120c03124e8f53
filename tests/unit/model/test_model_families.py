"""Parts that a family of models brings, against that family's code in transformers.

Latent attention, YaRN and other rotary scalings, windows, sinks, biases of experts and router, clamped activations,
norms over whole projections. Logits, loss and all gradients in float64, with loud weights, 12 experts, and sequences
longer than the original length.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from megatron_moe.config.schema import Config, DataConfig, ModelConfig, MoEConfig, TrainingConfig
from megatron_moe.model.decoder import Decoder
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import sharded_parameters
from tests.helpers.building import token_batch
from tests.helpers.huggingface import float32_means_float64

LAYERS, D, H, G, E, V, S, B = 3, 16, 4, 2, 12, 29, 14, 2
THEIRS: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": D,
    "intermediate_size": 12,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "vocab_size": V,
    "rms_norm_eps": 3e-3,
    "num_experts_per_tok": 3,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODEL: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": D,
    "ffn_hidden_size": 12,
    "num_attention_heads": H,
    "vocab_size": V,
    "norm_epsilon": 3e-3,
    "rotary_base": 123.0,
    "untie_embeddings_and_output_weights": True,
}
MOE: dict[str, Any] = {
    "num_experts": E,
    "moe_layer_freq": "1",
    "moe_router_load_balancing_type": ("none",),
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 8,
}
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 5.0, "original_max_position_embeddings": 8, "beta_fast": 2.0}
YARN |= {"beta_slow": 0.1}


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 123.0, **values}}


def yarn(**values: Any) -> dict[str, Any]:
    sizes = {"factor": 5.0, "original_max_position_embeddings": 8, "beta_fast": 2.0, "beta_slow": 0.1}
    return rope(rope_type="yarn", **sizes, **values) | {"max_position_embeddings": 40}


LATENT = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5, "kv_lora_rank": 10, "num_key_value_heads": H}
LATENT |= {"n_routed_experts": E, "moe_intermediate_size": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
OUR_LATENT = {
    "multi_latent_attention": True,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 5,
    "kv_lora_rank": 10,
    "rotary_interleaved": True,
    "qk_layernorm": True,
    "qk_layernorm_epsilon": 1e-6,
}
DEEPSEEK_MOE = {"moe_first_dense_layers": 1, "moe_shared_expert_intermediate_size": 16}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
PRE = {"moe_router_pre_softmax": True}


class Family(NamedTuple):
    name: str
    theirs: dict[str, Any]
    model: dict[str, Any]
    moe: dict[str, Any]


FAMILIES = {
    "deepseek v2 lite": Family(
        "DeepseekV2",
        {**LATENT, **yarn(mscale=0.7, mscale_all_dim=0.7), "q_lora_rank": None, "topk_method": "greedy"},
        {**OUR_LATENT, **YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        {**DEEPSEEK_MOE, **PRE},
    ),
    "deepseek v2": Family(
        "DeepseekV2",
        {
            **LATENT,
            **yarn(mscale=0.9, mscale_all_dim=0.6),
            "q_lora_rank": 9,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
        {**OUR_LATENT, **YARN, "q_lora_rank": 9, "mscale": 0.9, "mscale_all_dim": 0.6},
        {**DEEPSEEK_MOE, **PRE, **GROUPS, "moe_router_topk_scaling_factor": 16.0},
    ),
    "deepseek v3": Family(
        "DeepseekV3",
        {
            **LATENT,
            **yarn(mscale=1.0, mscale_all_dim=1.0),
            "q_lora_rank": 9,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        {**OUR_LATENT, **YARN, "q_lora_rank": 9, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**DEEPSEEK_MOE, **SIGMOID, **GROUPS, "moe_router_topk_scaling_factor": 2.5},
    ),
    "deepseek v3, halves": Family(
        "DeepseekV3",
        {**LATENT, **rope(rope_type="default"), "q_lora_rank": None, "n_group": 4, "topk_group": 2}
        | {"rope_interleave": False, "routed_scaling_factor": 1.0},
        {**OUR_LATENT, "rotary_interleaved": False},
        {**DEEPSEEK_MOE, **SIGMOID, **GROUPS},
    ),
    "gpt-oss": Family(
        "GptOss",
        {**yarn(truncate=False), "head_dim": 8, "num_local_experts": E, "sliding_window": 5, "intermediate_size": 8}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {
            **YARN,
            "yarn_correction_range_round_to_int": False,
            "num_query_groups": G,
            "kv_channels": 8,
            "add_bias_linear": True,
            "activation": "quick_geglu",
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
            "window_size": (4, 0),
            "window_attn_skip_freq": "2",
        },
        {},
    ),
    "olmoe": Family(
        "Olmoe",
        {**rope(rope_type="linear", factor=3.0), "num_experts": E, "intermediate_size": 8, "norm_topk_prob": False},
        {
            "num_query_groups": G,
            "qk_layernorm": True,
            "qk_layernorm_scope": "projection",
            "rope_type": "linear",
            "rotary_scaling_factor": 3.0,
        },
        {**PRE},
    ),
    "mixtral with a window": Family(
        "Mixtral",
        {**rope(rope_type="default"), "num_local_experts": E, "sliding_window": 4, "intermediate_size": 8},
        {"num_query_groups": G, "window_size": (3, 0)},
        {},
    ),
    "qwen3 with llama3's rotary": Family(
        "Qwen3Moe",
        {
            **rope(rope_type="llama3", factor=4.0, original_max_position_embeddings=60)
            | {"num_experts": E, "moe_intermediate_size": 8, "norm_topk_prob": True, "head_dim": 8},
        },
        {
            "num_query_groups": G,
            "kv_channels": 8,
            "qk_layernorm": True,
            "rope_type": "llama3",
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 60,
        },
        {},
    ),
}
FAMILIES["qwen3 with llama3's rotary"].theirs["rope_parameters"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

ATTENTION = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
    "q_a_proj": "query_down",
    "q_a_layernorm": "query_down_norm",
    "q_b_proj": "query_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_down_norm",
    "kv_b_proj": "kv_up",
}
PARTS = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "feed_forward_norm.weight",
    "self_attn.sinks": "attention.sinks",
    "mlp.gate.weight": "moe.gate.weight",
    "mlp.router.weight": "moe.gate.weight",
    "mlp.router.bias": "moe.gate.logit_bias",
    "mlp.experts.down_proj": "moe.experts.fc2",
    "mlp.experts.down_proj_bias": "moe.experts.fc2_bias",
    "mlp.down_proj.weight": "feed_forward.fc2.weight",
    "mlp.shared_experts.down_proj.weight": "moe.shared_expert.feed_forward.fc2.weight",
}
ENDS = {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "output.norm.weight"}
ENDS["lm_head.weight"] = "output.weight"


def in_our_names(tensors: dict[str, Tensor], gpt_oss: bool) -> dict[str, Tensor]:
    """Their tensors (weights, or gradients) by our names and in our shapes."""
    found = {ours: tensors[theirs] for theirs, ours in ENDS.items()}
    for name, tensor in tensors.items():
        if name in ENDS:
            continue
        _, _, layer, part = name.split(".", 3)
        ours = PARTS.get(part)
        if part.startswith("self_attn.") and ours is None:
            _, projection, kind = part.split(".")
            ours = f"attention.{ATTENTION[projection]}.{kind}"
        elif "gate_proj" in part:
            ours = part.replace("mlp.shared_experts.gate_proj", "moe.shared_expert.feed_forward.fc1")
            ours = ours.replace("mlp.gate_proj", "feed_forward.fc1")
            tensor = torch.stack([tensor, tensors[name.replace("gate_proj", "up_proj")]])
        elif "gate_up_proj" in part:
            ours = "moe.experts.fc1_bias" if "bias" in part else "moe.experts.fc1"
            if gpt_oss:  # columns: gate, up, gate, up, ...
                tensor = (tensor if "bias" in part else tensor.mT).unflatten(1, (-1, 2)).transpose(1, 2)
            else:
                tensor = tensor.unflatten(1, (2, -1))
        elif ".up_proj" in part:
            continue
        elif gpt_oss and part == "mlp.experts.down_proj":
            tensor = tensor.mT
        assert ours is not None, name
        found[f"layers.{layer}.{ours}"] = tensor
    return found


def loud(model: Any) -> Any:
    """Random weights, none of them where a default would hide a mistake."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4)
            if "norm" in key:
                p.add_(1.0)
            if "experts.gate_up_proj" in key:
                p.mul_(8.0)  # beyond the clamp
        for key, bias_E in model.named_buffers():
            if "e_score_correction_bias" in key:
                bias_E.copy_(torch.randn(E, generator=generator, dtype=torch.float64) * 0.5 - 1.2)
    return model.eval()


class Both(NamedTuple):
    """Their results, by our names, and our model with their weights."""

    logits_SBV: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    ours: Decoder
    ids_SB: Tensor


def both(family: Family) -> Both:
    generator = torch.Generator().manual_seed(5)
    ids_BS = torch.randint(0, V, (B, S + 1), generator=generator)
    settings = {**THEIRS, **family.theirs}
    with float32_means_float64():
        config = getattr(transformers, f"{family.name}Config")(**settings)
        reference = loud(getattr(transformers, f"{family.name}ForCausalLM")(config).double())
        logits_BSV = reference(input_ids=ids_BS[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten())
        loss.backward()
    gpt_oss = family.name == "GptOss"
    weights = in_our_names({k: v.detach() for k, v in reference.named_parameters()}, gpt_oss)
    gradients = in_our_names({k: v.grad for k, v in reference.named_parameters()}, gpt_oss)
    model = Decoder(
        Config(
            model=ModelConfig(**MODEL | family.model),
            moe=MoEConfig(**MOE | family.moe),
            data=DataConfig(seq_length=S),
            training=TrainingConfig(params_dtype="float64"),
        ),
        ParallelContext.single(),
    )
    parameters, ctx = sharded_parameters(model), ParallelContext.single()
    assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
    with torch.no_grad():
        for name, p in parameters.items():
            p.logical(p, ctx).copy_(weights[name])
        buffers = dict(reference.named_buffers())
        for key, bias_E in model.named_buffers():
            if key.endswith("bias_E"):
                theirs = key.replace("moe", "mlp").replace("bias_E", "e_score_correction_bias")
                bias_E.copy_(buffers[f"model.{theirs}"])
    return Both(logits_BSV.transpose(0, 1), loss, gradients, model, ids_BS.T)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_loss_and_gradients(family: str) -> None:
    theirs = both(FAMILIES[family])
    model, ids_SB = theirs.ours, theirs.ids_SB
    tokens = token_batch(ids_SB[:-1], labels_SB=ids_SB[1:])
    assert model.output is not None
    found_SBV = model.output(model.hidden(None, tokens))[..., :V]
    tight = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found_SBV, theirs.logits_SBV, **tight)
    loss = model(None, tokens)
    torch.testing.assert_close(loss, theirs.loss, **tight)
    loss.backward()
    for name, p in sharded_parameters(model).items():
        assert p.grad is not None, name
        whole = p.logical(p.grad, ParallelContext.single())
        torch.testing.assert_close(whole, theirs.gradients[name], **tight, msg=lambda m, n=name: f"{n}: {m}")


Change = Callable[[Family], Family]


def without(**values: Any) -> Change:
    return lambda family: family._replace(model={**family.model, **values})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("deepseek v3", without(rotary_interleaved=False)),
        ("deepseek v3", without(rope_type="rope")),
        ("deepseek v3", without(mscale_all_dim=0.0)),
        ("deepseek v3", without(qk_layernorm_epsilon=1e-5)),
        ("gpt-oss", without(yarn_correction_range_round_to_int=True)),
        ("gpt-oss", without(window_size=(5, 0))),
        ("gpt-oss", without(activation_func_clamp_value=None)),
        ("qwen3 with llama3's rotary", without(rope_high_freq_factor=5.0)),
    ],
)
def test_the_comparison_would_notice(family: str, change: Change) -> None:
    theirs = both(change(FAMILIES[family]))
    tokens = token_batch(theirs.ids_SB[:-1], labels_SB=theirs.ids_SB[1:])
    assert theirs.ours.output is not None
    found_SBV = theirs.ours.output(theirs.ours.hidden(None, tokens))[..., :V]
    assert (found_SBV - theirs.logits_SBV).abs().max() > 1e-6
