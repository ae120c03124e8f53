"""Everything that can be said about a mixture-of-experts configuration before anything is built."""

from collections.abc import Iterable

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.capacity import capacity_checks
from megatron_moe.moe.losses import loss_checks
from megatron_moe.moe.routers import ROUTERS


def moe_checks(config: MoEConfig) -> Iterable[str]:
    """Yield one sentence per fault; none for a dense model."""
    if config.num_experts is None:
        return
    if config.num_experts < 1:
        yield f"--num-experts {config.num_experts} must be positive."
        return
    if not 1 <= config.moe_router_topk <= config.num_experts:
        yield (
            f"--moe-router-topk {config.moe_router_topk} must be from 1 to --num-experts "
            f"{config.num_experts}."
        )
        return
    yield from ROUTERS[config.moe_router].checks(config)
    yield from capacity_checks(config)
    yield from loss_checks(config)
