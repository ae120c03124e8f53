"""GShard's top-2 gating: two experts a token, the second by a coin, slots counted per group of tokens.

::

    first choices of all tokens, in order        slots 0 1 2 ... of their expert
    second choices of all tokens, in order       go on counting where the first ended
    slot >= capacity, or coin lost               the token does without that expert
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.capacity import group_slots
from megatron_moe.moe.replay import decided
from megatron_moe.moe.routing import Choice, RouterInputs, best_ids, make_choice, multi_hot


def gshard_top2(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Algorithm 1 of GShard (arXiv 2006.16668, section 2.2), over whole groups.

    With g1 >= g2 the two largest softmax scores, divided by their sum, the second expert is used if a number
    u in [0, 1) is below 2 g2. ``moe_gshard_slot_counting``: "paper" lets a second choice lost by the coin
    use up a slot, as printed; "code" does not (lingvo). ``moe_gshard_second_policy`` "all" has no coin.
    ``moe_gshard_normalize`` says whether the pair is divided by its sum before or after dropping.
    Evaluation is the same: the paper makes no difference.
    """
    slots = group_slots(inputs.logits_GTE.shape[1], config, inputs.training)
    return gshard_gating(inputs, config, slots)


def gshard_gating(inputs: RouterInputs, config: MoEConfig, slots: int | None) -> Choice:
    """``gshard_top2`` with the number of slots given; None for no limit."""
    scores_GTE = torch.softmax(inputs.logits_GTE, dim=-1)
    num_experts = scores_GTE.shape[-1]
    ids_GT2 = best_ids(inputs.logits_GTE, 2)
    pair_GT2 = torch.softmax(inputs.logits_GTE.gather(-1, ids_GT2), dim=-1)
    wanted_GT2 = torch.ones_like(ids_GT2, dtype=torch.bool)
    if config.moe_gshard_second_policy == "random":
        won_GT = decided(lambda: 2 * pair_GT2[..., 1].detach() > inputs.uniform("second", 1)[..., 0])
        wanted_GT2 = torch.stack((wanted_GT2[..., 0], won_GT), dim=-1)
    if inputs.valid_GT is not None:
        ids_GT2 = ids_GT2.masked_fill(~inputs.valid_GT.unsqueeze(-1), -1)
    chosen_ids_GT2 = ids_GT2.masked_fill(~wanted_GT2, -1)
    kept_GT2 = chosen_ids_GT2 >= 0
    if slots is not None:
        counted_GT2 = ids_GT2 if config.moe_gshard_slot_counting == "paper" else chosen_ids_GT2
        kept_GT2 = kept_GT2 & (_slot_of(counted_GT2, num_experts) < slots)
    weights_GT2 = pair_GT2.masked_fill(~kept_GT2, 0)
    if config.moe_gshard_normalize == "after":
        # A softmax over the survivors is the pair divided by their sum; tokens without any are masked again.
        logits_GT2 = inputs.logits_GTE.gather(-1, ids_GT2.clamp(min=0)).masked_fill(~kept_GT2, -torch.inf)
        logits_GT2 = logits_GT2.masked_fill(~kept_GT2.any(dim=-1, keepdim=True), 0)
        weights_GT2 = torch.softmax(logits_GT2, dim=-1).masked_fill(~kept_GT2, 0)
    return make_choice(
        chosen_ids_GT2.masked_fill(~kept_GT2, -1),
        weights_GT2 * config.moe_router_topk_scaling_factor,
        scores_GTE,
        inputs.valid_GT,
        chosen_ids_GTK=chosen_ids_GT2,
    )


def _slot_of(ids_GT2: Tensor, num_experts: int) -> Tensor:
    """Slot of each choice in its expert's buffer: all first choices of the group before any second choice."""
    group, num_tokens, _ = ids_GT2.shape
    # First choices [T], then second choices [T], as one queue of 2T entries.
    queue_GN1 = ids_GT2.transpose(1, 2).reshape(group, 2 * num_tokens, 1)
    wanted_GNE = multi_hot(queue_GN1, num_experts)
    slots_GN1 = (wanted_GNE.cumsum(dim=1) - wanted_GNE).gather(-1, queue_GN1.clamp(min=0))
    return slots_GN1.view(group, 2, num_tokens).transpose(1, 2)


def gshard_checks(config: MoEConfig) -> Iterable[str]:
    """Sentences about settings that GShard's gating does not have."""
    if config.moe_router_topk != 2:
        yield (
            "--moe-router gshard_top2 takes two experts per token: --moe-router-topk "
            f"{config.moe_router_topk} must be 2."
        )
    if config.num_experts is not None and config.num_experts < 2:
        yield ("--moe-router gshard_top2 needs at least two experts: raise --num-experts, or use --moe-router switch.")
