"""The routing methods by name: a new one is a file here and a line below (see docs/add_a_router.md)."""

from megatron_moe.moe.routers.expert_choice import expert_choice, expert_choice_checks
from megatron_moe.moe.routers.forced import force_balanced, force_skewed, forced_checks
from megatron_moe.moe.routers.gshard_top2 import gshard_checks, gshard_top2
from megatron_moe.moe.routers.hash import hash_checks, hash_router
from megatron_moe.moe.routers.noisy_topk import noisy_topk
from megatron_moe.moe.routers.sinkhorn import sinkhorn
from megatron_moe.moe.routers.switch import switch, switch_checks
from megatron_moe.moe.routers.topk import topk, topk_checks
from megatron_moe.moe.routing import RouterSpec

_LIMITS = ("moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_group_score_topk")
_WEIGHTS = ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_norm_topk")
_GSHARD = ("moe_gshard_second_policy", "moe_gshard_slot_counting", "moe_gshard_normalize")

ROUTERS: dict[str, RouterSpec] = {
    "topk": RouterSpec(topk, scope="token", options=_LIMITS + _WEIGHTS, checks=topk_checks),
    "switch": RouterSpec(switch, scope="token", options=_LIMITS, checks=switch_checks),
    "gshard_top2": RouterSpec(
        gshard_top2,
        scope="group",
        own_capacity=True,
        leaves_holes=True,
        options=_GSHARD,
        checks=gshard_checks,
    ),
    "expert_choice": RouterSpec(
        expert_choice,
        scope="group",
        own_capacity=True,
        leaves_holes=True,
        options=("moe_allow_acausal_routing",),
        checks=expert_choice_checks,
    ),
    "sinkhorn": RouterSpec(sinkhorn, scope="group"),
    "hash": RouterSpec(hash_router, scope="token", options=("moe_hash_table",), checks=hash_checks),
    "noisy_topk": RouterSpec(noisy_topk, scope="token", logits_per_expert=2),
    "force_balanced": RouterSpec(force_balanced, scope="group"),
    "force_skewed": RouterSpec(force_skewed, scope="group", options=("moe_router_force_skew",), checks=forced_checks),
}
