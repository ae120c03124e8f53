"""Tiny models of transformers with loud weights: none of them where a default would hide a mistake.

With the default initialisation 7 of 30 faults of conversion change nothing: norms are 1, biases 0, routing a near tie.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch  # noqa: F401 - transformers imports it late, and its table of types is not to see the patch
import torch
import transformers

LAYERS, S, B, V, E = 3, 40, 2, 61, 12  # two digits of experts: a sort by name would put 10 before 2
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "rms_norm_eps": 3e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 123.0,
    "factor": 4.0,
    "beta_fast": 3.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}
LATENT = {"kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 5, "num_key_value_heads": 4}
FINE = {"moe_intermediate_size": 10, "num_experts_per_tok": 3}
GROUPS = {
    "n_routed_experts": E,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": E, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 7}),
    "mixtral, tied": ("Mixtral", {"num_local_experts": E, "tie_word_embeddings": True, "sliding_window": None}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **FINE,
            "num_experts": E,
            "shared_expert_intermediate_size": 14,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**FINE, "num_experts": E, "head_dim": 8, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3_moe, not normalised": ("Qwen3Moe", {**FINE, "num_experts": E, "head_dim": 8, "rope_parameters": YARN}),
    "olmoe": ("Olmoe", {"num_experts": E, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **FINE,
            **GROUPS,
            "head_dim": 8,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 123.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **FINE,
            **GROUPS,
            **LATENT,
            "q_lora_rank": 11,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2, lite": (
        "DeepseekV2",
        {**FINE, **LATENT, "n_routed_experts": E, "q_lora_rank": None, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **FINE,
            **GROUPS,
            **LATENT,
            "q_lora_rank": 11,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": E,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,  # as the hidden size: a square matrix does not show that it is transposed
            "head_dim": 8,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "llama": ("Llama", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
}
MOE_FAMILIES = [name for name in FAMILIES if name not in ("llama", "qwen2", "qwen3")]


@contextlib.contextmanager
def float32_means_float64() -> Iterator[None]:
    """transformers computes norms, softmax and rotary tables in float32 whatever the model is; here it does not."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def loud_model(family: str, **changes: Any) -> Any:
    """A model of transformers in float64, whose weights are float32 numbers. Build and run it with the patch above."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings, **changes}, attn_implementation="eager")
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    generator = torch.Generator().manual_seed(3)

    def drawn(shape: torch.Size, scale: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale + mean).double()

    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(drawn(p.shape, 0.3, 1.0 if "norm" in key else 0.0))
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key:
                buffer.copy_(
                    drawn(buffer.shape, 0.3, -10.0)
                )  # negative: a mask of 0 would win; far out: bfloat16 shows
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a model as safetensors."""
    model.save_pretrained(folder, **options)
    return folder


def tokens(seed: int = 5) -> torch.Tensor:
    """[B, S], longer than the original length of the scaled rotary embeddings."""
    return torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(seed))
