"""Pyramids, fine-grained experts and residual experts under layouts that cut what is new in them."""

from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, Trace, differences, layout, trace, vary

VARIANTS: dict[str, dict[str, Any]] = {
    # Layers of 4 and of 8 experts; tables and counts of both go through one reduction.
    "pyramid": {
        "num_experts": None,
        "moe_num_experts_per_layer": "[4]+[8]",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
        "moe_router_load_balancing_type": ("global_aux_loss", "aux_loss"),
        "moe_aux_loss_coeff": (0.3, 0.1),
        "moe_expert_capacity_factor": 1.0,
    },
    "segmentation": {"num_experts": 4, "moe_segmentation_factor": 2, "moe_router_topk": 1},
    "residual": {
        "moe_router": "switch",
        "moe_router_topk": 1,
        "moe_shared_expert_intermediate_size": 48,
        "moe_residual_coefficient": True,
    },
}
LAYOUTS = {
    "pyramid": ["dp=4,ep=4,mbs=2", "tp=2,cp=2,ep=2,etp=2,mbs=4", "pp=2,dp=2,ep=2,schedule=zb-v,zero=2"],
    "segmentation": ["tp=2,dp=2,ep=2,etp=2"],
    "residual": ["tp=2,cp=2,ep=4,mbs=2", "pp=2,tp=2,ep=2,schedule=zb-h1,zero=1"],
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, ranks: RankPool) -> tuple[str, Trace]:
    return request.param, trace(vary(BASE, **VARIANTS[request.param]), 1, ranks)


def test_layouts(variant: tuple[str, Trace], ranks: RankPool) -> None:
    name, expected = variant
    for text in LAYOUTS[name]:
        values, world_size = layout(text)
        found = trace(vary(BASE, **VARIANTS[name], **values), world_size, ranks)
        assert differences(found, expected) == [], text


def test_segments_are_the_experts_written_out(ranks: RankPool) -> None:
    expected = trace(vary(BASE, num_experts=8, moe_ffn_hidden_size=8, moe_router_topk=2), 1, ranks)
    assert differences(trace(vary(BASE, **VARIANTS["segmentation"]), 1, ranks), expected) == []
