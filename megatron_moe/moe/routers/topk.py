"""Top-k: every token takes the K experts it scores highest, weighed and limited in all published ways.

::

    logits --score--> s --(+ bias)--> [limit to M groups] --> K best ids
                      |                                          |
                      +------------- weights of the ids <--------+      the bias never enters a weight

=================  =======================================  =========================================
flags              weight of a chosen expert                 models
=================  =======================================  =========================================
(default)          softmax over the K chosen logits          Mixtral (2401.04088), Megatron's default
pre-softmax        softmax over all E logits                 Switch (K = 1), DeepSeekMoE, V2, OLMoE
pre-softmax, norm  the same divided by the chosen's sum      Qwen3; equal to the default
sigmoid            sigmoid divided by the chosen's sum       DeepSeek-V3 (2412.19437, eq. 12-16)
=================  =======================================  =========================================

All are multiplied by ``moe_router_topk_scaling_factor``. Normalised weights are computed from log scores,
so that scores that underflow (sigmoid of -100) still give the right ratio.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.kernels import scoring
from megatron_moe.moe.replay import decided
from megatron_moe.moe.routing import Choice, PlaceTable, RouterInputs, best_ids, make_choice


def topk(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Route by the K best scores; see the module's table. Slots are ordered best first.

    With ``moe_router_num_groups`` and ``moe_router_group_topk`` a token is limited to M groups of experts,
    each a contiguous block. Softmax scores rank groups by their best expert (DeepSeek-V2, 2405.04434,
    section 2.2.2); sigmoid scores by the sum of the best two, bias included (DeepSeek-V3, section 2.1.2,
    where K/M = 2).
    """
    if inputs.kernels != "torch" and config.moe_router_group_topk is None:
        return _fused(inputs, config)
    limited = inputs.bias_E is not None or config.moe_router_group_topk is not None
    log_scores_GTE = log_scores(inputs.logits_GTE, config)
    # Logits order the experts as scores do, without their rounding; but biases and groups add up scores.
    keys_GTE = log_scores_GTE.detach().exp() if limited else inputs.logits_GTE.detach()
    if inputs.bias_E is not None:
        keys_GTE = keys_GTE + inputs.bias_E
    ids_GTK = best_ids(limit_groups(keys_GTE, config), config.moe_router_topk)
    plain_ids_GTK = _plain_ids(inputs, config) if limited else None
    weights_GTK = combine_weights(log_scores_GTE, ids_GTK, config)
    scores_GTE = torch.softmax(log_scores_GTE, dim=-1)
    return make_choice(ids_GTK, weights_GTK, scores_GTE, inputs.valid_GT, plain_ids_GTK=plain_ids_GTK)


def _plain_ids(inputs: RouterInputs, config: MoEConfig) -> Tensor | None:
    """The choice without bias and groups, where a balance loss counts it."""
    counted = "seq_aux_loss" in config.moe_router_load_balancing_type
    return best_ids(inputs.logits_GTE, config.moe_router_topk) if counted else None


def scoring_rule(config: MoEConfig) -> scoring.ScoringRule:
    """The convention that the flags name."""
    sigmoid = config.moe_router_score_function == "sigmoid"
    normalised = sigmoid or not config.moe_router_pre_softmax or config.moe_router_norm_topk
    return scoring.ScoringRule(config.moe_router_topk, sigmoid, normalised, config.moe_router_topk_scaling_factor)


def _fused(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """The same in one kernel, for a choice without groups."""
    logits_TE, made = inputs.logits_GTE.flatten(0, 1), list[scoring.Scored]()

    def score(decided_TK: Tensor | None) -> scoring.Scored:
        return scoring.score_topk(logits_TE, inputs.bias_E, scoring_rule(config), decided_TK, inputs.kernels)

    def decide() -> Tensor:
        made.append(score(None))
        return made[0].ids_TK

    ids_TK = decided(decide)
    scored = made[0] if made else score(ids_TK)
    ids_GTK, weights_GTK, scores_GTE = (x.view(*inputs.logits_GTE.shape[:2], -1) for x in scored[:3])
    plain_ids_GTK = None if inputs.bias_E is None else _plain_ids(inputs, config)
    choice = make_choice(ids_GTK, weights_GTK, scores_GTE, inputs.valid_GT, plain_ids_GTK=plain_ids_GTK)
    if inputs.valid_GT is not None:  # padding has lost its experts
        return choice
    return choice._replace(table=PlaceTable(scored.positions_TK.flatten(), scored.counts_E))


def log_scores(logits_GTE: Tensor, config: MoEConfig) -> Tensor:
    """Logarithm of the scores: log softmax, or log sigmoid."""
    return scoring.log_scores(logits_GTE, config.moe_router_score_function == "sigmoid")


def combine_weights(log_scores_GTE: Tensor, ids_GTK: Tensor, config: MoEConfig) -> Tensor:
    """Weights of the chosen experts, by the convention that the flags name."""
    rule = scoring_rule(config)
    return scoring.chosen_weights(log_scores_GTE.gather(-1, ids_GTK), rule.normalised, rule.scale)


def limit_groups(keys_GTE: Tensor, config: MoEConfig) -> Tensor:
    """Keys with -inf outside each token's M best groups; lower group index wins ties.

    -inf and not 0, because biased keys may be negative.
    """
    num_groups, keep = config.moe_router_num_groups, config.moe_router_group_topk
    if num_groups is None or keep is None:
        return keys_GTE
    members = keys_GTE.unflatten(-1, (num_groups, -1))
    counted = config.moe_router_group_score_topk
    if counted is None:
        counted = 2 if config.moe_router_score_function == "sigmoid" else 1
    group_scores = members.topk(min(counted, members.shape[-1]), dim=-1).values.sum(dim=-1)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best_ids(group_scores, keep), True)
    return members.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)


def topk_checks(config: MoEConfig) -> Iterable[str]:
    """Sentences about a top-k whose router would not learn."""
    if config.moe_router_topk == 1 and scoring_rule(config).normalised and config.num_experts != 1:
        yield (
            "--moe-router-topk 1 with normalised weights gives every token weight 1 and the router no "
            "gradient: add --moe-router-pre-softmax with softmax scores, or use --moe-router switch."
        )
