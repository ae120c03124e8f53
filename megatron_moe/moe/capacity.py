"""Capacity: how many slots an expert offers to a group of tokens, and who gets them.

::

    chosen     t0 t1 t2 t3 t4 t5 --> expert 3, capacity 4
    position   t0 t1 t2 t3            first come, in the logical order of tokens
    probs      t1 t2 t4 t5            highest combine weight
    random     t0 t1 t3 t4            highest counter-based random number

One rule serves every router that chooses experts for tokens. Per expert and group, the copies that want the
expert are ranked and the first ``slots`` of them stay. With *position* the rank is the token's place in the
group alone: an early token's second choice goes before a later token's first choice, as "first come" says
and as Megatron-LM intends. GShard's Algorithm 1 decides otherwise, all first choices before any second
choice, and therefore counts its own slots (``routers/gshard_top2.py``). *probs* is batch-prioritised
routing (V-MoE, arXiv 2106.05974, section 4.1) at the level of single copies; *random* is random token
selection (arXiv 2109.10465, and DeepSpeed).

A dropped copy keeps nothing: the token passes through the residual. Survivors keep their weight.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.replay import decided
from megatron_moe.moe.routing import Choice, RouterInputs, RouterSpec, best_ids, keep_only, multi_hot


def capacity_slots(
    num_tokens: int,
    num_experts: int,
    topk: int,
    factor: float,
    *,
    rounding: str = "ceil",
    minimum: int = 0,
    multiple: int = 1,
) -> int:
    """Slots per expert and group: ``factor * topk * num_tokens / num_experts``, rounded.

    GShard prints 2S/E (factor 1, K = 2) and Switch T/E * factor without saying how to round. Megatron
    rounds up (our default); lingvo rounds down to at least 4 and then up to a multiple of 4; DeepSpeed
    rounds up to at least a minimum.

    Args:
        num_tokens: T, the size of the logical group, padding included: a static number.
        rounding: "ceil" or "floor".
        minimum, multiple: raise the result to ``minimum``, then up to a multiple of ``multiple``.

    Raises:
        ValueError: for an unknown rounding.
    """
    if rounding not in ("ceil", "floor"):
        raise ValueError(f"rounding must be 'ceil' or 'floor', not {rounding!r}")
    exact = num_tokens * topk / num_experts * factor
    slots = max(math.ceil(exact) if rounding == "ceil" else math.floor(exact), minimum)
    return math.ceil(slots / multiple) * multiple


def capacity_factor(config: MoEConfig, training: bool) -> float | None:
    """The factor that holds now; None for dropless. Evaluation may have one of its own."""
    if not training and config.moe_eval_capacity_factor is not None:
        return config.moe_eval_capacity_factor
    return config.moe_expert_capacity_factor


def group_slots(num_tokens: int, config: MoEConfig, training: bool) -> int | None:
    """Slots per expert for a group of ``num_tokens``; None for dropless."""
    factor = capacity_factor(config, training)
    if factor is None:
        return None
    assert config.num_experts is not None
    return capacity_slots(num_tokens, config.num_experts, config.moe_router_topk, factor)


def bounded_slots(counts_GE: Tensor, bound: int) -> Tensor:
    """Bounded capacity (Tutel, arXiv 2206.03382): the fewest slots that drop nothing, up to ``bound``.

    Who is dropped is the same as with a fixed capacity of ``bound``; what shrinks is a padded buffer.

    Returns:
        int64 scalar on the device. Reading it waits for the device.
    """
    return counts_GE.max().clamp(max=bound)


def apply_capacity(choice: Choice, slots: int, policy: str, uniform: Callable[[str, int], Tensor]) -> Choice:
    """Keep at most ``slots`` copies per expert and group.

    Args:
        choice: a decision over whole groups, in the logical order of tokens.
        slots: from ``capacity_slots``; 0 drops everything.
        policy: "position", "probs" or "random"; the lower token index wins ties of the latter two.
        uniform: as in ``RouterInputs``; asked for ("drop", K) by "random" alone.

    Raises:
        ValueError: for an unknown policy.
    """
    ids_GTK = choice.expert_ids_GTK
    num_experts = choice.scores_GTE.shape[-1]
    if policy == "position":
        wanted_GTE = multi_hot(ids_GTK, num_experts)
        ranks_GTE = wanted_GTE.cumsum(dim=1) - wanted_GTE
    elif policy == "probs":
        ranks_GTE = _ranks_by_key(ids_GTK, choice.weights_GTK.detach(), num_experts)
    elif policy == "random":
        ranks_GTE = _ranks_by_key(ids_GTK, uniform("drop", ids_GTK.shape[-1]), num_experts)
    else:
        raise ValueError(f"--moe-token-drop-policy must be position, probs or random, not {policy!r}")
    ranks_GTK = ranks_GTE.gather(-1, ids_GTK.clamp(min=0))
    return keep_only(choice, (ids_GTK >= 0) & (ranks_GTK < slots))


def _ranks_by_key(ids_GTK: Tensor, keys_GTK: Tensor, num_experts: int) -> Tensor:
    """Int64 [G, T, E]: rank of each token among those that want the expert, highest key first."""
    # Column E collects the empty slots, which scatter anywhere and are read by nobody.
    columns_GTK = torch.where(ids_GTK < 0, num_experts, ids_GTK)
    keys_GTE = keys_GTK.new_full((*ids_GTK.shape[:-1], num_experts + 1), -math.inf)
    keys_GTE = keys_GTE.scatter(-1, columns_GTK, keys_GTK)[..., :num_experts]
    order_GTE = decided(lambda: keys_GTE.sort(dim=1, descending=True, stable=True).indices)
    places_GTE = torch.arange(ids_GTK.shape[1], device=ids_GTK.device).view(1, -1, 1).expand_as(order_GTE)
    return torch.empty_like(order_GTE).scatter_(1, order_GTE, places_GTE)


def apply_device_capacity(
    choice: Choice, factor: float, num_devices: int, protected_GT: Tensor | None = None
) -> Choice:
    """DeepSeek-V2's device-level token dropping (arXiv 2405.04434, section 2.2.4).

    Experts form ``num_devices`` contiguous blocks. Each block has a budget of ``floor(factor * T K /
    num_devices)`` copies per group, and the copies of lowest weight go until it is met. The paper leaves
    the unit open: here it is the copy (token, expert).

    Args:
        protected_GT: bool; tokens that are never dropped. Their copies use up budget first.
    """
    ids_GTK, num_experts = choice.expert_ids_GTK, choice.scores_GTE.shape[-1]
    num_groups, num_tokens, topk = ids_GTK.shape
    budget = math.floor(factor * num_tokens * topk / num_devices)
    device_ids_GTK = torch.where(ids_GTK < 0, -1, ids_GTK // (num_experts // num_devices))
    # Copies in token-major order, inside a token by expert: the order that breaks ties.
    by_expert_GTK = ids_GTK.argsort(dim=-1, stable=True)
    keys_GTK = choice.weights_GTK.detach()
    if protected_GT is not None:
        keys_GTK = keys_GTK.masked_fill(protected_GT.unsqueeze(-1), math.inf)
    keys_GN = keys_GTK.gather(-1, by_expert_GTK).reshape(num_groups, -1)
    devices_GN = device_ids_GTK.gather(-1, by_expert_GTK).reshape(num_groups, -1)
    order_GN = best_ids(keys_GN, keys_GN.shape[1])
    wanted_GND = multi_hot(devices_GN.gather(1, order_GN).unsqueeze(-1), num_devices)
    ranks_GN = ((wanted_GND.cumsum(dim=1) - wanted_GND) * wanted_GND).sum(dim=-1)
    ranks_GN = torch.empty_like(ranks_GN).scatter_(1, order_GN, ranks_GN)
    ranks_GTK = ranks_GN.view(num_groups, num_tokens, topk)
    ranks_GTK = torch.empty_like(ranks_GTK).scatter_(-1, by_expert_GTK, ranks_GTK)
    keep_GTK = ranks_GTK < budget
    if protected_GT is not None:
        keep_GTK = keep_GTK | protected_GT.unsqueeze(-1)
    return keep_only(choice, keep_GTK & (ids_GTK >= 0))


def protected_tokens(uniform: Callable[[str, int], Tensor], share: float) -> Tensor:
    """Bool [G, T]: the tokens of about ``share`` of the groups, drawn by the number of a group's first token.

    DeepSeek-V2 spares about 10% of the *sequences*: the same, where the group is the sequence.
    """
    drawn_GT = uniform("protect", 1)[..., 0]
    return (drawn_GT[:, :1] < share).expand_as(drawn_GT)


def decide(spec: RouterSpec, inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Route, then drop what exceeds a capacity: the whole decision of a layer over its logical groups."""
    choice = spec.route(inputs, config)
    if config.moe_device_capacity_factor is not None and inputs.training:
        assert config.moe_router_num_groups is not None
        protected_GT = protected_tokens(inputs.uniform, config.moe_device_capacity_protected)
        choice = apply_device_capacity(
            choice, config.moe_device_capacity_factor, config.moe_router_num_groups, protected_GT
        )
    slots = group_slots(inputs.logits_GTE.shape[1], config, inputs.training)
    if slots is not None and not spec.own_capacity:
        choice = apply_capacity(choice, slots, config.moe_token_drop_policy, inputs.uniform)
    return choice


def slots_may_be_empty(spec: RouterSpec, config: MoEConfig, has_padding: bool, training: bool) -> bool:
    """Whether ``decide`` can leave empty slots: a static fact, the ``can_drop`` of ``flatten``."""
    by_device = config.moe_device_capacity_factor is not None and training
    return spec.leaves_holes or has_padding or by_device or capacity_factor(config, training) is not None


def needs_whole_groups(spec: RouterSpec, config: MoEConfig, training: bool) -> bool:
    """Whether ``decide`` looks beyond the single token, so that a group that spans ranks must be gathered."""
    return spec.scope == "group" or slots_may_be_empty(spec, config, False, training)


def capacity_checks(config: MoEConfig) -> Iterable[str]:
    """Sentences about impossible capacities."""
    for flag, factor in (
        ("--moe-expert-capacity-factor", config.moe_expert_capacity_factor),
        ("--moe-eval-capacity-factor", config.moe_eval_capacity_factor),
        ("--moe-device-capacity-factor", config.moe_device_capacity_factor),
    ):
        if factor is not None and not (factor > 0 and math.isfinite(factor)):
            yield f"{flag} {factor} would drop every token: give a positive number, or leave the flag out."
    if config.moe_device_capacity_factor is not None and config.moe_router_num_groups is None:
        yield "--moe-device-capacity-factor needs --moe-router-num-groups: a group of experts is a device."
    if not 0 <= config.moe_device_capacity_protected <= 1:
        yield (
            f"--moe-device-capacity-protected {config.moe_device_capacity_protected} is a share of the "
            "groups: give a number from 0 to 1."
        )
