"""Gradients of every router against finite differences, in float64: weights and scores, dropped or not."""

from dataclasses import replace

import pytest
import torch
from moe_oracle import inputs_of

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.capacity import decide
from megatron_moe.moe.losses import z_loss_sum
from megatron_moe.moe.routers import ROUTERS

BASE = MoEConfig(num_experts=4, moe_router_topk=2)
VARIANTS = {name: replace(BASE, moe_router=name) for name in ROUTERS if name != "switch"} | {
    "switch": replace(BASE, moe_router="switch", moe_router_topk=1),
    "topk_pre": replace(BASE, moe_router_pre_softmax=True),
    "topk_pre_norm": replace(BASE, moe_router_pre_softmax=True, moe_router_norm_topk=True),
    "topk_sigmoid": replace(BASE, moe_router_score_function="sigmoid"),
    "topk_groups": replace(BASE, moe_router_num_groups=2, moe_router_group_topk=1),
    "gshard_after": replace(BASE, moe_router="gshard_top2", moe_gshard_normalize="after"),
    "sinkhorn_top1": replace(BASE, moe_router="sinkhorn", moe_router_topk=1),
}


@pytest.mark.parametrize("factor", [None, 0.6], ids=["dropless", "dropping"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_router_gradients(variant, factor):
    config = replace(VARIANTS[variant], moe_expert_capacity_factor=factor)
    spec = ROUTERS[config.moe_router]
    generator = torch.Generator().manual_seed(1)
    width = 4 * spec.logits_per_expert
    logits_GTE = torch.randn(2, 5, width, generator=generator, dtype=torch.float64, requires_grad=True)
    valid_GT = torch.ones(2, 5, dtype=torch.bool)
    valid_GT[1, 3] = False

    def outputs(z_GTE):
        choice = decide(spec, inputs_of(z_GTE, valid_GT=valid_GT), config)
        return (choice.weights_GTK, choice.scores_GTE)

    # The counter-based numbers are the same in every call, and no decision sits on an edge.
    assert torch.autograd.gradcheck(outputs, (logits_GTE,))


def test_z_loss_gradient():
    generator = torch.Generator().manual_seed(1)
    logits_TE = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    valid_T = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda z: z_loss_sum(z, valid_T), (logits_TE,))
