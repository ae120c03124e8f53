"""Sinkhorn: scale the scores of a group until every expert is wanted equally, and choose by the result.

::

    exp(logits)_TE --scale rows to 1/T, columns to 1/E, in turn--> plan_TE --top-k--> ids
"""

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.routing import Choice, RouterInputs, best_ids, make_choice

_EPS = 1e-8
_LARGEST_EXPONENT = 100.0
_MOST_ITERATIONS = 200


def sinkhorn(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Choose the top-k of the Sinkhorn plan in training, of the logits in evaluation (Megatron-LM; S-BASE,
    arXiv 2202.01169, is the same idea).

    The plan has no gradient. Weights are those of the raw logits: sigmoid for K = 1, softmax over all experts
    otherwise, not renormalised. Groups are balanced apart. Waits for the device once per iteration.
    """
    logits_GTE = inputs.logits_GTE
    keys_GTE = logits_GTE.detach()
    if inputs.training:
        keys_GTE, _ = sinkhorn_plan(keys_GTE, inputs.valid_GT)
    ids_GTK = best_ids(keys_GTE, config.moe_router_topk)
    scores_GTE = torch.softmax(logits_GTE, dim=-1)
    gates_GTE = torch.sigmoid(logits_GTE) if config.moe_router_topk == 1 else scores_GTE
    weights_GTK = gates_GTE.gather(-1, ids_GTK) * config.moe_router_topk_scaling_factor
    return make_choice(ids_GTK, weights_GTK, scores_GTE, inputs.valid_GT)


def sinkhorn_plan(logits_GTE: Tensor, valid_GT: Tensor | None, tolerance: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Scale exp(logits) so that rows sum to 1/T and columns nearly to 1/E.

    Each group stops by itself when its column factors change by at most ``tolerance`` in the mean
    (Megatron's rule), usually after about ten iterations. Very peaked scores would need hundreds of
    thousands: all stop after 200. Float64 throughout, so that no rounding of the layout decides.

    Returns:
        plan_GTE: float64; rows of padding are 0.
        iterations_G: int64.
    """
    num_experts = logits_GTE.shape[-1]
    largest_G11 = logits_GTE.double().amax(dim=(1, 2), keepdim=True)
    # A common factor changes nothing but the weight of the epsilon: used only where exp would overflow.
    kernel_GTE = torch.exp(logits_GTE.double() - (largest_G11 - _LARGEST_EXPONENT).clamp(min=0))
    if valid_GT is not None:
        kernel_GTE = kernel_GTE * valid_GT.unsqueeze(-1)
        tokens_G1 = valid_GT.sum(dim=1, keepdim=True).clamp(min=1).double()
    else:
        tokens_G1 = kernel_GTE.new_full((kernel_GTE.shape[0], 1), kernel_GTE.shape[1])
    columns_GE = kernel_GTE.new_ones(kernel_GTE.shape[0], num_experts)
    rows_GT = kernel_GTE.new_ones(kernel_GTE.shape[:2])
    iterations_G = torch.zeros(kernel_GTE.shape[0], dtype=torch.int64, device=kernel_GTE.device)
    active_G1 = torch.ones_like(tokens_G1, dtype=torch.bool)
    for _ in range(_MOST_ITERATIONS):
        new_rows_GT = 1 / (tokens_G1 * (torch.einsum("gte,ge->gt", kernel_GTE, columns_GE) + _EPS))
        rows_GT = torch.where(active_G1, new_rows_GT, rows_GT)
        new_columns_GE = 1 / (num_experts * (torch.einsum("gte,gt->ge", kernel_GTE, rows_GT) + _EPS))
        change_G1 = (new_columns_GE - columns_GE).abs().mean(dim=-1, keepdim=True)
        columns_GE = torch.where(active_G1, new_columns_GE, columns_GE)
        iterations_G += active_G1.squeeze(-1)
        active_G1 = active_G1 & (change_G1 > tolerance)
        if not active_G1.any():
            break
    return columns_GE.unsqueeze(1) * kernel_GTE * rows_GT.unsqueeze(-1), iterations_G
