"""Everything that can be said about a mixture-of-experts configuration before anything is built."""

import math
from collections.abc import Iterable
from dataclasses import fields

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
        yield (f"--moe-router-topk {config.moe_router_topk} must be from 1 to --num-experts {config.num_experts}.")
        return
    yield from _unread_options(config)
    yield from _group_checks(config)
    yield from ROUTERS[config.moe_router].checks(config)
    yield from capacity_checks(config)
    yield from loss_checks(config)


def _unread_options(config: MoEConfig) -> Iterable[str]:
    """Sentences about settings that belong to other routing methods than the one chosen."""
    known = {name for spec in ROUTERS.values() for name in spec.options}
    for field in fields(config):
        value = getattr(config, field.name)
        unread = field.name in known and field.name not in ROUTERS[config.moe_router].options
        if unread and value != field.default:
            readers = [name for name, spec in ROUTERS.items() if field.name in spec.options]
            yield (
                f"--{field.name.replace('_', '-')} means nothing to --moe-router {config.moe_router}: leave "
                f"it out, or use {' or '.join(readers)}."
            )


def _group_checks(config: MoEConfig) -> Iterable[str]:
    """Sentences about groups of experts that do not fit."""
    experts, topk_ = config.num_experts or 0, config.moe_router_topk
    groups, keep = config.moe_router_num_groups, config.moe_router_group_topk
    by_device = config.moe_device_capacity_factor is not None or any(
        name.startswith("deepseek_") for name in config.moe_router_load_balancing_type
    )
    if groups is None:
        if keep is not None:
            yield f"--moe-router-group-topk {keep} needs --moe-router-num-groups."
        return
    if keep is None and not by_device:
        yield (
            f"--moe-router-num-groups {groups} alone limits nothing: add --moe-router-group-topk, or a "
            "device-level loss or capacity."
        )
    if groups < 1 or experts % groups:
        divisors = [g for g in range(1, experts + 1) if experts % g == 0]
        yield (
            f"--num-experts {experts} does not divide into --moe-router-num-groups {groups} equal groups: "
            f"choose one of {', '.join(map(str, divisors))}."
        )
        return
    if keep is None:
        return
    if not 1 <= keep <= groups:
        yield f"--moe-router-group-topk {keep} must be from 1 to --moe-router-num-groups {groups}."
    elif config.moe_router_group_score_topk is not None and config.moe_router_group_score_topk < 1:
        yield f"--moe-router-group-score-topk {config.moe_router_group_score_topk} must be positive."
    elif keep * (experts // groups) < topk_:
        yield (
            f"--moe-router-group-topk {keep} leaves {keep * (experts // groups)} experts to a token, fewer "
            f"than --moe-router-topk {topk_}: allow at least {math.ceil(topk_ * groups / experts)} groups."
        )
