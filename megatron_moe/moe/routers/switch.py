"""Switch: one expert a token, weighed by its probability among all experts."""

from collections.abc import Iterable
from dataclasses import replace

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.routers.topk import topk
from megatron_moe.moe.routing import Choice, RouterInputs


def switch(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Route to the argmax expert with weight p of the softmax, not renormalised (arXiv 2101.03961, eq. 1-2).

    The weight must not be renormalised: it would be 1, and the router would get no gradient. Capacity (2.2),
    input jitter and the small initialisation (section 2.4) are settings of the layer, not of the choice.
    """
    as_topk = replace(
        config, moe_router_score_function="softmax", moe_router_pre_softmax=True, moe_router_norm_topk=False
    )
    return topk(inputs, as_topk)


def switch_checks(config: MoEConfig) -> Iterable[str]:
    """Sentences about settings that Switch does not have."""
    if config.moe_router_topk != 1:
        yield (
            "--moe-router switch takes one expert per token: --moe-router-topk "
            f"{config.moe_router_topk} must be 1 (--moe-router topk takes more)."
        )
