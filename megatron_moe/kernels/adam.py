"""The optimizer that updates flat tensors: torch's AdamW, fused where the device has it."""

from collections.abc import Sequence
from typing import Any

import torch


def make_adamw(
    groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW over parameter groups, each with its weight decay.

    The state of a parameter is ``step`` (a tensor []), ``exp_avg`` and ``exp_avg_sq``.
    """
    tensors = [tensor for group in groups for tensor in group["params"]]
    fused = all(tensor.device.type != "meta" for tensor in tensors)  # a dry run has no kernels
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)
