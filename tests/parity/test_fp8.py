"""FP8 under layouts that cut every matrix, against one process: a tile's scale is the same whoever holds it.

What is rounded to eight bits could be rounded to a neighbour where additions in another order differ in the last of
fifty-two: for one number in 1e12, and these tests have some 1e7.
"""

from typing import Any

import numpy as np
import pytest

from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, differences, layout, trace, vary

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 160,  # no multiple of a tile: what is not cut may end in a shorter one
    "ffn_hidden_size": 256,
    "num_attention_heads": 2,
    "kv_channels": 128,
    "num_experts": 4,
    "moe_layer_freq": "[0,1]",
    "moe_ffn_hidden_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "global_batch_size": 2,
    "micro_batch_size": 2,
}
LATENT = {
    "multi_latent_attention": True,
    "kv_channels": None,
    "num_query_groups": None,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 128,
    "v_head_dim": 128,
}
FP8 = vary(BASE, **SIZES, fp8_format="hybrid", fp8_recipe="blockwise")
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "offloaded, with biases": (
        {"fp8_format": "e4m3", "add_bias_linear": True, "cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 1},
        ("tp=2,ep=2", "tp=2,etp=2,cp=2,zero=3", "dp=2,ep=2,pp=2,schedule=zb-h1,overlap=2,deduplicate=1"),
    ),
    "latent, recomputed": (LATENT | {"recompute_granularity": "full"}, ("tp=2,etp=2,zero=1", "cp=2,ep=2")),
}


@pytest.mark.parametrize("name", list(CASES))
def test_layouts(ranks: RankPool, name: str) -> None:
    features, layouts = CASES[name]
    expected = trace(vary(FP8, **features), 1, ranks)
    for text in layouts:
        values, world_size = layout(text)
        assert differences(trace(vary(FP8, **features, **values), world_size, ranks), expected) == [], text


def test_a_model_is_close_to_the_same_without_fp8(ranks: RankPool) -> None:
    """Losses of three steps to 2%; the first gradients point where those without rounding do, and are not the same."""
    found, expected = trace(FP8, 1, ranks), trace(vary(FP8, fp8_format=None), 1, ranks)
    assert all(1e-4 < abs(a / b - 1) < 0.02 for a, b in zip(found.losses, expected.losses, strict=True))
    for name, gradient in expected.gradients[0].items():
        mine, theirs = found.gradients[0][name].ravel(), gradient.ravel()
        assert 0.9 < mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs) < 0.999, name
