"""Balancing without a loss (DeepSeek-V3): a bias per expert that enters the choice and never a weight."""

from torch import Tensor


def update_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """Raise the bias of experts below the mean load and lower it above: b + rate * sign(mean - load).

    arXiv 2412.19437, section 2.1.2; arXiv 2408.15664, Algorithm 1. Once per optimizer step, with the counts
    of the global batch before any capacity, summed over every rank that saw tokens; never in evaluation.

    Args:
        bias_E: float32 or float64.
        counts_E: int64. The comparison E * load < sum is exact, so all ranks and layouts agree.

    Returns:
        The new bias; the old one is unchanged.
    """
    errors_E = (counts_E.sum() - counts_E * counts_E.numel()).sign()
    return bias_E + rate * errors_E.to(bias_E.dtype)
