"""The decoder against models nobody here wrote: Hugging Face's, with the same loud weights.

transformers computes norms, softmax and rotary tables in float32 whatever the model's type; while one of its models
is built and run here, its ``float32`` means float64, so that the comparison is tight.
"""

from typing import Any

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

LAYERS, D, F, H, G, E, V, S, B = 2, 16, 12, 4, 2, 6, 29, 11, 2
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODEL: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": D,
    "ffn_hidden_size": F,
    "num_attention_heads": H,
    "num_query_groups": G,
    "vocab_size": V,
    "make_vocab_size_divisible_by": 8,  # three stored rows are padding
    "rotary_base": 100.0,
}
FINE = {"num_experts": E, "moe_intermediate_size": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
PRE = {"moe_router_pre_softmax": True}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        {"num_local_experts": E, "num_experts_per_tok": 2, "sliding_window": None},
        {"untie_embeddings_and_output_weights": True},
        {"moe_ffn_hidden_size": F, "moe_router_topk": 2},
    ),
    "mixtral, tied": (
        "Mixtral",
        {"num_local_experts": E, "num_experts_per_tok": 1, "sliding_window": None, "tie_word_embeddings": True},
        {},
        {"moe_ffn_hidden_size": F, "moe_router_topk": 1},
    ),
    "qwen3": (  # norms of queries and keys, wide heads, weights normalised after the choice
        "Qwen3Moe",
        {**FINE, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 8},
        {"untie_embeddings_and_output_weights": True, "qk_layernorm": True, "kv_channels": 8},
        {**PRE, "moe_ffn_hidden_size": 8, "moe_router_topk": 3, "moe_router_norm_topk": True},
    ),
    "qwen3, first layer dense": (
        "Qwen3Moe",
        {**FINE, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 4, "mlp_only_layers": [0]},
        {"untie_embeddings_and_output_weights": True, "qk_layernorm": True},
        {"moe_ffn_hidden_size": 8, "moe_first_dense_layers": 1},
    ),
    "qwen2": (  # biases of the projections, a shared expert behind a gate, weights as they are
        "Qwen2Moe",
        {
            **FINE,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 10,
            "qkv_bias": True,
        },
        {"untie_embeddings_and_output_weights": True, "add_qkv_bias": True},
        {
            **PRE,
            "moe_ffn_hidden_size": 8,
            "moe_shared_expert_intermediate_size": 10,
            "moe_shared_expert_gate": True,
        },
    ),
    "glm 4.5": (  # DeepSeek-V3's routing: sigmoids, bias, groups, scaling; half of each head is rotated
        "Glm4Moe",
        {
            "n_routed_experts": E,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
        {
            "untie_embeddings_and_output_weights": True,
            "qk_layernorm": True,
            "add_qkv_bias": True,
            "kv_channels": 8,
            "rotary_percent": 0.5,
        },
        {
            "moe_ffn_hidden_size": 8,
            "moe_shared_expert_intermediate_size": 16,
            "moe_first_dense_layers": 1,
            "moe_router_topk": 3,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 3,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
        },
    ),
}


def theirs(family: str) -> Any:
    """Their model with random weights, none of them where a default would hide a mistake."""
    name, config, _, _ = FAMILIES[family]
    settings = {**SIZES, "tie_word_embeddings": False, **config}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4)
            if "norm" in key:
                p.add_(1.0)
        for key, bias_E in model.named_buffers():
            if "e_score_correction_bias" in key:
                bias_E.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0, -0.3, 0.2]))
    return model.eval()


def ours(family: str) -> Decoder:
    _, _, model, moe = FAMILIES[family]
    config = Config(
        model=ModelConfig(**MODEL, **model),
        moe=MoEConfig(num_experts=E, moe_layer_freq="1", moe_router_load_balancing_type=("none",), **moe),
        data=DataConfig(seq_length=S),
        training=TrainingConfig(params_dtype="float64"),
    )
    return Decoder(config, ParallelContext.single())


def in_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors (weights, or gradients) by our names and in our shapes."""
    names = {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "output.norm.weight"}
    names["lm_head.weight"] = "output.weight"
    found = {ours: tensors[theirs] for theirs, ours in names.items() if theirs in tensors}
    for layer in range(LAYERS):
        get = {k.removeprefix(f"model.layers.{layer}."): v for k, v in tensors.items() if f"layers.{layer}." in k}
        put: dict[str, Tensor] = {
            "attention_norm.weight": get["input_layernorm.weight"],
            "feed_forward_norm.weight": get["post_attention_layernorm.weight"],
        }
        for short, long in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            for kind in ("weight", "bias"):
                if f"self_attn.{short}_proj.{kind}" in get:
                    put[f"attention.{long}.{kind}"] = get[f"self_attn.{short}_proj.{kind}"]
            if f"self_attn.{short}_norm.weight" in get:
                put[f"attention.{long}_norm.weight"] = get[f"self_attn.{short}_norm.weight"]
        if "mlp.gate.weight" in get:
            put["moe.gate.weight"] = get["mlp.gate.weight"]
            put["moe.experts.fc1"] = get["mlp.experts.gate_up_proj"].unflatten(1, (2, -1))
            put["moe.experts.fc2"] = get["mlp.experts.down_proj"]
        for their_part, our_part in (
            ("mlp.", "feed_forward."),
            ("mlp.shared_expert.", "moe.shared_expert.feed_forward."),
            ("mlp.shared_experts.", "moe.shared_expert.feed_forward."),
        ):
            if f"{their_part}gate_proj.weight" in get:
                projections = [get[f"{their_part}{kind}_proj.weight"] for kind in ("gate", "up")]
                put[f"{our_part}fc1.weight"] = torch.stack(projections)
                put[f"{our_part}fc2.weight"] = get[f"{their_part}down_proj.weight"]
        if "mlp.shared_expert_gate.weight" in get:
            put["moe.shared_expert.gate_weight"] = get["mlp.shared_expert_gate.weight"]
        found |= {f"layers.{layer}.{name}": tensor for name, tensor in put.items()}
    return found


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_loss_and_gradients(family):
    generator = torch.Generator().manual_seed(5)
    ids_BS = torch.randint(0, V, (B, S + 1), generator=generator)
    with float32_means_float64():
        reference = theirs(family)
        logits_BSV = reference(input_ids=ids_BS[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten())
        loss.backward()
    weights = in_our_names({k: v.detach() for k, v in reference.named_parameters()})
    gradients = in_our_names({k: v.grad for k, v in reference.named_parameters() if v.grad is not None})

    model = ours(family)
    parameters, ctx = sharded_parameters(model), ParallelContext.single()
    assert parameters.keys() == weights.keys() == gradients.keys(), parameters.keys() ^ weights.keys()
    with torch.no_grad():
        for name, p in parameters.items():
            p.logical(p, ctx).copy_(weights[name])
            if "embedding" in name or name == "output.weight":
                p[V:] = 100.0  # padding must not matter, whatever it holds
        for key, bias_E in model.named_buffers():
            if key.endswith("bias_E"):
                theirs_E = dict(reference.named_buffers())[
                    f"model.{key.replace('moe', 'mlp').replace('bias_E', 'e_score_correction_bias')}"
                ]
                bias_E.copy_(theirs_E)
    tokens = token_batch(ids_BS[:, :-1].T, labels_SB=ids_BS[:, 1:].T)
    assert model.output is not None
    found_SBV = model.output(model.hidden(None, tokens))[..., :V]
    tight = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found_SBV.transpose(0, 1), logits_BSV, **tight)
    our_loss = model(None, tokens)
    torch.testing.assert_close(our_loss, loss, **tight)
    our_loss.backward()
    for name, p in parameters.items():
        assert p.grad is not None, name
        torch.testing.assert_close(p.logical(p.grad, ctx), gradients[name], **tight, msg=lambda m, n=name: f"{n}: {m}")
        padding = p.grad.clone()
        p.logical(padding, ctx).zero_()
        assert not padding.any(), f"padding of {name} has a gradient"
