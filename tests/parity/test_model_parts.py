"""Parts of a model under layouts that cut what is new in them."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.parity import test_checkpoint_layouts as checkpoints
from tests.parity.harness import BASE, TOLERANCE, Trace, differences, layout, trace, vary

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
PARTS: dict[str, dict[str, Any]] = {
    "latent": {
        **LATENT,
        **PACKED,
        "recompute_granularity": "selective",
        "recompute_modules": ("mla_up_proj",),
        "q_lora_rank": 12,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
        "mscale_all_dim": 0.7,
        "rotary_interleaved": True,
    },
    "latent, dense, queries from x": {
        **LATENT,
        "num_experts": None,
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "layernorm", "mla_up_proj"),
    },
    "gpt-oss": {
        **PACKED,
        "num_query_groups": 1,
        "add_bias_linear": True,
        "activation": "quick_geglu",
        "activation_func_clamp_value": 0.02,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "window_size": (5, 0),
        "window_attn_skip_freq": "2",
    },
    "window alone": {"window_size": (2, 0), "softmax_type": "off-by-one"},
    "norm of projections": {"qk_layernorm": True, "qk_layernorm_scope": "projection"},
    "two more tokens": {**PACKED, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5, "padded": True},
    "one more token, untied": {
        "mtp_num_layers": 1,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.1,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    },
}
LAYOUTS = {
    "latent": ["tp=2,ep=2", "tp=2,cp=2,cp_comm=p2p,ep=2,mbs=4", "pp=2,cp=2,schedule=zb-v,mbs=2"],
    "latent, dense, queries from x": ["tp=2,sp=0,mbs=4", "tp=2,sp=1,dp=2,zero=3,mbs=4"],
    "gpt-oss": [
        "tp=2,dp=2,ep=2,etp=2,mbs=4",
        "cp=4,cp_comm=p2p,ep=4,mbs=4",
        "tp=2,cp=2,ep=2,mbs=4",
        "pp=2,schedule=zb-h1,mbs=4",
    ],
    "window alone": ["cp=2,mbs=4", "cp=4,cp_comm=p2p,mbs=4"],
    "norm of projections": ["tp=2,ep=2,mbs=4", "tp=4,ep=2,mbs=4"],
    "two more tokens": [
        "tp=2,cp=2,ep=2,mbs=4",
        "pp=2,dp=2,zero=1,mbs=2",
        "pp=2,schedule=zb-v,dp=2,zero=3,mbs=2",
        "pp=2,schedule=zb-h1,mbs=2",
    ],
    "one more token, untied": ["pp=2,tp=2,ep=2,mbs=4", "pp=2,schedule=zb-v,mbs=2", "pp=2,dp=2,zero=3,mbs=2"],
}


def run(part: str, text: str, ranks: RankPool) -> Trace:
    values, world_size = layout(text) if text else ({}, 1)
    features = dict(PARTS[part])
    padded = features.pop("padded", False)
    return trace(vary(BASE, **features, **values), world_size, ranks, padded=padded)


@pytest.fixture(scope="module")
def references() -> dict[str, Trace]:
    return {}


@pytest.mark.parametrize(("part", "text"), [(part, text) for part, texts in LAYOUTS.items() for text in texts])
def test_part(part: str, text: str, references: dict[str, Trace], ranks: RankPool) -> None:
    if part not in references:
        references[part] = run(part, "", ranks)
    reference = references[part]
    assert differences(run(part, text, ranks), reference) == []
    for name, gradient in reference.gradients[1].items():
        assert gradient.any(), f"{name} has no gradient: nothing is shown about it"


def test_a_written_layout_of_prediction_modules(ranks: RankPool) -> None:
    config = vary(BASE, mtp_num_layers=1)
    values, world_size = layout("pp=2,mbs=2")
    written = vary(config, pipeline_model_parallel_layout="Et*3|tmL", **values)
    assert differences(trace(written, world_size, ranks), trace(config, 1, ranks)) == []


def test_checkpoints_hold_the_embedding_once(ranks: RankPool, tmp_path: Path) -> None:
    """The last stage's copy of an untied embedding is not stored, and is filled when a checkpoint is loaded."""
    config = vary(BASE, mtp_num_layers=1, untie_embeddings_and_output_weights=True)
    one, source = tmp_path / "one", tmp_path / "first"
    reference = checkpoints.run("dp=1,mbs=8", config, ranks, None, {2: one, 4: one}, 4)
    checkpoints.run("pp=2,mbs=4", config, ranks, None, {2: source}, 2)
    assert checkpoints.largest_difference(source, one, 2) < TOLERANCE
    for number, text in enumerate(("pp=2,schedule=zb-v,tp=2,mbs=4", "pp=2,dp=2,zero=3,mbs=2")):
        again, after = tmp_path / f"again{number}", tmp_path / f"after{number}"
        losses = checkpoints.run(text, config, ranks, source, {2: again, 4: after}, 4)
        assert losses == pytest.approx(reference[2:], rel=TOLERANCE), text
        assert checkpoints.largest_difference(again, source, 2) == 0.0, text
        assert checkpoints.largest_difference(after, one, 4) < TOLERANCE, text
        source = again
