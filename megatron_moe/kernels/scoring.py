"""From router logits to scores, the K best experts, their weights, and the dense table of tokens and experts.

    logits_TE --score--> [+ bias] --K best--> ids_TK, weights_TK, counts_E
                                              positions_TK: place of a copy among those of its expert

The table takes the place of one-hot masks and sorts (DeepSpeed-MoE, arXiv 2201.05596, section 5.4).

The rule of scores and weights is that of ``moe/routers/topk.py``, which says where each variant was published.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.selection import functions


class ScoringRule(NamedTuple):
    """How logits become weights.

    Attributes:
        num_slots: K.
        sigmoid: scores are sigmoids of the logits, else a softmax over all experts.
        normalised: the chosen scores are divided by their sum. Sigmoids always are.
        scale: factor on the weights, not 0.
    """

    num_slots: int
    sigmoid: bool
    normalised: bool
    scale: float


class Scored(NamedTuple):
    """Of T tokens, best expert first; the lower index wins a tie.

    Attributes:
        ids_TK: int64 chosen experts.
        weights_TK: their combine weights, differentiable.
        scores_TE: scores divided by their sum, differentiable.
        positions_TK: int64 place of each copy among those of its expert, in the order of tokens.
        counts_E: int64 copies of each expert.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    positions_TK: Tensor
    counts_E: Tensor


def score_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: ScoringRule,
    decided_TK: Tensor | None = None,
    kernels: str = "torch",
) -> Scored:
    """Decide.

    Args:
        logits_TE: float32 or float64.
        bias_E: added to the scores for the choice alone.
        decided_TK: the choice, where it was made before: a recomputation gives the rest.
    """
    if kernels == "torch":
        return score_topk_forward(logits_TE, bias_E, rule, decided_TK)
    return Scored(*_ScoreTopk.apply(logits_TE, bias_E, rule, decided_TK, kernels))  # type: ignore[misc]


def log_scores(logits: Tensor, sigmoid: bool) -> Tensor:
    """Logarithm of the scores over the last dim: log softmax, or log sigmoid."""
    return F.logsigmoid(logits) if sigmoid else torch.log_softmax(logits, dim=-1)


def chosen_weights(chosen_log_scores: Tensor, normalised: bool, scale: float) -> Tensor:
    """Weights of the chosen experts, [..., K]."""
    # s_i / sum s = softmax(log s): the form that survives underflow.
    weights = torch.softmax(chosen_log_scores, dim=-1) if normalised else chosen_log_scores.exp()
    return weights * scale


def score_topk_forward(
    logits_TE: Tensor, bias_E: Tensor | None, rule: ScoringRule, decided_TK: Tensor | None
) -> Scored:
    """The decision, differentiable by autograd."""
    log_TE, ids_TK = log_scores(logits_TE, rule.sigmoid), decided_TK
    if ids_TK is None:
        keys_TE = (logits_TE if bias_E is None else log_TE.exp() + bias_E).detach()
        ids_TK = keys_TE.sort(dim=-1, descending=True, stable=True).indices[:, : rule.num_slots].contiguous()
    weights_TK = chosen_weights(log_TE.gather(1, ids_TK), rule.normalised, rule.scale)
    multi_hot_TE = torch.zeros_like(logits_TE, dtype=torch.int64).scatter_(1, ids_TK, 1)
    positions_TK = (multi_hot_TE.cumsum(0) - multi_hot_TE).gather(1, ids_TK)
    return Scored(ids_TK, weights_TK, torch.softmax(log_TE, dim=-1), positions_TK, multi_hot_TE.sum(0))


def score_topk_backward(
    grad_weights_TK: Tensor, grad_scores_TE: Tensor, logits_TE: Tensor, scored: Scored, rule: ScoringRule
) -> Tensor:
    """Gradient of the logits [T, E], in closed form."""
    products_TK = scored.weights_TK * grad_weights_TK
    if rule.normalised:
        products_TK = products_TK - scored.weights_TK * products_TK.sum(1, keepdim=True) / rule.scale
    scores_TE = scored.scores_TE
    inner_T1 = (grad_scores_TE * scores_TE).sum(1, keepdim=True)
    grad_TE = scores_TE * (grad_scores_TE - inner_T1)
    if not rule.normalised:
        grad_TE = grad_TE - scores_TE * products_TK.sum(1, keepdim=True)
    grad_TE = grad_TE.scatter_add(1, scored.ids_TK, products_TK)
    return grad_TE * torch.sigmoid(-logits_TE) if rule.sigmoid else grad_TE


class _ScoreTopk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        rule: ScoringRule,
        decided_TK: Tensor | None,
        kernels: str,
    ) -> Scored:
        scored = functions("scoring", kernels).score_topk_forward(logits_TE.contiguous(), bias_E, rule, decided_TK)
        ctx.save_for_backward(logits_TE, *scored)
        ctx.mark_non_differentiable(scored.ids_TK, scored.positions_TK, scored.counts_E)
        ctx.rule, ctx.kernels = rule, kernels
        return scored

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits_TE, *scored = ctx.saved_tensors
        _, grad_weights_TK, grad_scores_TE, *_ = grads
        backward = functions("scoring", ctx.kernels).score_topk_backward
        grad_TE = backward(grad_weights_TK, grad_scores_TE, logits_TE, Scored(*scored), ctx.rule)
        return grad_TE, None, None, None, None
