"""The whole model with Triton's kernels, interpreted, against PyTorch's: under a layout that cuts what they work on."""

from typing import Any

from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, differences, layout, trace, vary

SMALL: dict[str, Any] = {"num_layers": 2, "num_experts": 4, "global_batch_size": 1, "micro_batch_size": 1}


def test_triton(ranks: RankPool) -> None:
    values, world_size = layout("tp=2,ep=2")
    features = SMALL | {"recompute_granularity": "full", "moe_router_enable_expert_bias": True}
    features |= {"moe_router_bias_update_rate": 0.05, "untie_embeddings_and_output_weights": True}
    expected = trace(vary(BASE, **features), 1, ranks)
    found = trace(vary(BASE, **features | values, kernels="triton"), world_size, ranks)
    assert differences(found, expected) == []
