"""The routing methods by name: a new one is a file here and a line below (see docs/add_a_router.md)."""

from megatron_moe.moe.routers.expert_choice import expert_choice, expert_choice_checks
from megatron_moe.moe.routers.forced import force_balanced, force_skewed, forced_checks
from megatron_moe.moe.routers.gshard_top2 import gshard_checks, gshard_top2
from megatron_moe.moe.routers.hash import hash_checks, hash_router
from megatron_moe.moe.routers.noisy_topk import noisy_topk
from megatron_moe.moe.routers.sinkhorn import sinkhorn, sinkhorn_checks
from megatron_moe.moe.routers.switch import switch, switch_checks
from megatron_moe.moe.routers.topk import topk, topk_checks
from megatron_moe.moe.routing import RouterSpec

ROUTERS: dict[str, RouterSpec] = {
    "topk": RouterSpec(topk, scope="token", checks=topk_checks),
    "gshard_top2": RouterSpec(
        gshard_top2, scope="group", own_capacity=True, leaves_holes=True, checks=gshard_checks
    ),
    "switch": RouterSpec(switch, scope="token", checks=switch_checks),
    "expert_choice": RouterSpec(
        expert_choice, scope="group", own_capacity=True, leaves_holes=True, checks=expert_choice_checks
    ),
    "sinkhorn": RouterSpec(sinkhorn, scope="group", checks=sinkhorn_checks),
    "hash": RouterSpec(hash_router, scope="token", checks=hash_checks),
    "noisy_topk": RouterSpec(noisy_topk, scope="token", logits_per_expert=2),
    "force_balanced": RouterSpec(force_balanced, scope="group"),
    "force_skewed": RouterSpec(force_skewed, scope="group", checks=forced_checks),
}
