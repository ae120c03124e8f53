"""Cross-entropy over one shard of the vocabulary: what a rank computes of it alone, without communication.

    logits_NV --statistics--> peak_N, sum_N, label_N --reduced over ranks--> loss_N
       kept_NV <---------------------------------- scale_N, grad_N <--------- grad of loss_N

For each token the probability of column v is exp(logit[v] - peak) * rescale, where peak is the shard's own largest
logit and rescale = exp(peak - largest of all) / sum over all: no need to visit the shard again once the ranks agree.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ShardStatistics(NamedTuple):
    """Of each token, over the columns of one shard.

    Attributes:
        kept_NV: what the backward pass needs of the logits; it will be overwritten there.
        peak_N: the largest logit; float32's lowest number where the shard has no column.
        sum_N: sum of exp(logit - peak).
        label_N: the label's logit; 0 where the label is in another shard.
    """

    kept_NV: Tensor
    peak_N: Tensor
    sum_N: Tensor
    label_N: Tensor


def shard_statistics(logits_NV: Tensor, labels_N: Tensor, num_columns: int) -> ShardStatistics:
    """Logits are the largest tensor of a step, so there is one of that size.

    Args:
        logits_NV: [N, V] of this shard. What is kept may take their place.
        labels_N: int64, counted from the shard's first column; outside [0, num_columns) the label is elsewhere.
        num_columns: columns behind these are padding, which no token can be.

    Returns:
        In float32, or float64 for float64 logits.
    """
    work_NV = logits_NV.detach().to(torch.promote_types(logits_NV.dtype, torch.float32))
    work_NV[:, num_columns:] = -torch.inf
    peak_N = work_NV.amax(1).clamp(min=torch.finfo(torch.float32).min)
    column_N, elsewhere_N = _columns(labels_N, num_columns)
    label_N = work_NV.gather(1, column_N.unsqueeze(1)).squeeze(1).masked_fill(elsewhere_N, 0.0)
    exp_NV = work_NV.sub_(peak_N.unsqueeze(1)).exp_()
    return ShardStatistics(exp_NV, peak_N, exp_NV.sum(1), label_N)


def shard_gradient(
    kept_NV: Tensor,
    labels_N: Tensor,
    num_columns: int,
    peak_N: Tensor,
    rescale_N: Tensor,
    grad_N: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits: (probability - one at the label) * grad, in the memory of ``kept_NV`` where it can.

    Args:
        rescale_N: factor that makes exp(logit - peak) a probability.
        grad_N: gradient of each token's loss.
        dtype: of the logits.
    """
    grad_NV = kept_NV.mul_((rescale_N * grad_N).unsqueeze(1))
    column_N, elsewhere_N = _columns(labels_N, num_columns)
    here_N = grad_N.masked_fill(elsewhere_N, 0.0)
    return grad_NV.scatter_add_(1, column_N.unsqueeze(1), -here_N.unsqueeze(1)).to(dtype)


def _columns(labels_N: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """(columns of the labels, 0 for those elsewhere; which are elsewhere)."""
    elsewhere_N = (labels_N < 0) | (labels_N >= num_columns)
    return labels_N.masked_fill(elsewhere_N, 0), elsewhere_N
