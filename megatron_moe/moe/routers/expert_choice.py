"""Expert choice: every expert takes the tokens it scores highest, so that the load is balanced by design.

::

              e0 e1 e2                                      t0: e0, e2
        t0    .6 .1 .3     each column keeps                t1: e1
        t1    .2 .7 .1     its 2 largest       -->          t2: (none: residual only)
        t2    .2 .3 .5                                      t3: ...
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.capacity import capacity_factor, capacity_slots
from megatron_moe.moe.routing import Choice, RouterInputs, best_ids, make_choice


def expert_choice(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Let each expert choose ``factor * K * T / E`` tokens of the group (arXiv 2202.09368, section 3.2).

    The paper's c, the mean number of experts per token, is ``moe_router_topk`` times the capacity factor (1
    if none is set); the number of slots is rounded up. Weights are softmax probabilities over the experts,
    not renormalised. A token may get from 0 to E experts, so the slots of the ``Choice`` number E, in order
    of experts.
    """
    num_tokens, num_experts = inputs.logits_GTE.shape[1:]
    factor = capacity_factor(config, inputs.training)
    slots = capacity_slots(num_tokens, num_experts, config.moe_router_topk, 1.0 if factor is None else factor)
    scores_GTE = torch.softmax(inputs.logits_GTE, dim=-1)
    chosen_GTE = choose_tokens(scores_GTE, inputs.valid_GT, slots)
    expert_ids_GTE = torch.where(chosen_GTE, torch.arange(num_experts, device=scores_GTE.device), -1)
    weights_GTE = scores_GTE.masked_fill(~chosen_GTE, 0) * config.moe_router_topk_scaling_factor
    return make_choice(expert_ids_GTE, weights_GTE, scores_GTE, inputs.valid_GT)


def choose_tokens(scores_GTE: Tensor, valid_GT: Tensor | None, slots: int) -> Tensor:
    """Bool [G, T, E]: the ``slots`` best tokens of each expert (all, if fewer); lower tokens win ties."""
    keys_GTE = scores_GTE.detach()
    if valid_GT is not None:
        keys_GTE = keys_GTE.masked_fill(~valid_GT.unsqueeze(-1), -torch.inf)
    token_ids_GES = best_ids(keys_GTE.transpose(1, 2), slots)
    chosen_GET = torch.zeros_like(keys_GTE.transpose(1, 2), dtype=torch.bool)
    return chosen_GET.scatter(-1, token_ids_GES, True).transpose(1, 2)


def expert_choice_checks(config: MoEConfig) -> Iterable[str]:
    """Refuse causal training unless asked for."""
    if not config.moe_allow_acausal_routing:
        yield (
            "--moe-router expert_choice lets later tokens decide which experts an earlier token gets, so a "
            "causal language model trained with it sees the future and cannot generate as it was trained: "
            "choose another router, or say --moe-allow-acausal-routing."
        )
