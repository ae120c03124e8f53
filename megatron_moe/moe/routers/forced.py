"""Forced loads, for benchmarks and tests: the choice ignores the scores, the weights do not."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.routing import Choice, RouterInputs, make_choice


def force_balanced(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Deal tokens to experts in turn: loads of a group differ by at most one copy."""
    return _forced(inputs, config, skew=1.0)


def force_skewed(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Load expert 0 with ``moe_router_force_skew`` times the mean, the others equally with the rest."""
    return _forced(inputs, config, skew=config.moe_router_force_skew)


def _forced(inputs: RouterInputs, config: MoEConfig, skew: float) -> Choice:
    """Choose by position; weigh by a softmax over the chosen logits, so that the router still learns."""
    num_groups, num_tokens, num_experts = inputs.logits_GTE.shape
    ids_TK = dealt_ids(num_tokens, num_experts, config.moe_router_topk, skew).to(inputs.logits_GTE.device)
    ids_GTK = ids_TK.expand(num_groups, -1, -1)
    weights_GTK = torch.softmax(inputs.logits_GTE.gather(-1, ids_GTK), dim=-1)
    weights_GTK = weights_GTK * config.moe_router_topk_scaling_factor
    scores_GTE = torch.softmax(inputs.logits_GTE, dim=-1)
    return make_choice(ids_GTK, weights_GTK, scores_GTE, inputs.valid_GT)


def dealt_ids(num_tokens: int, num_experts: int, topk: int, skew: float) -> Tensor:
    """Int64 [T, K]: experts by position such that expert 0 has ``skew`` times the mean load.

    Expert 0 goes to a share ``skew * K / E`` of the tokens, evenly spaced; all other slots are dealt to the
    others in turn. A skew of 1 is balance. The turn is a shuffled one: a token's experts lie on as many ranks as those
    of a token that chooses at random, where neighbours would share theirs.
    """
    # The small amount keeps products that are whole numbers from falling below them.
    marks = torch.floor(torch.arange(num_tokens + 1, dtype=torch.float64) * (skew * topk / num_experts) + 1e-9)
    before_T, has_first_T = marks[:-1].long(), marks.diff().long()
    slots_TK = torch.arange(topk) - has_first_T.unsqueeze(-1)
    dealt_T = torch.arange(num_tokens) * topk - before_T
    num_others = max(num_experts - 1, 1)
    turn = 1 + torch.randperm(num_others, generator=torch.Generator().manual_seed(0))
    return torch.where(slots_TK < 0, 0, turn[(dealt_T.unsqueeze(-1) + slots_TK) % num_others])


def forced_checks(config: MoEConfig) -> Iterable[str]:
    """Sentences about a skew that cannot be."""
    most = (config.num_experts or 1) / config.moe_router_topk
    if config.moe_router == "force_skewed" and not 1 <= config.moe_router_force_skew <= most:
        yield (
            f"--moe-router-force-skew {config.moe_router_force_skew:g}: expert 0 can have from 1 to "
            f"E/K = {most:g} times the mean load."
        )
