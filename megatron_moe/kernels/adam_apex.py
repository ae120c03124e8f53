"""The function of ``adam.py`` by NVIDIA Apex: all tensors in a few launches. Not yet run on hardware."""

from collections.abc import Sequence
from typing import Any

import torch
from apex.optimizers import FusedAdam


class _CountingAdam(FusedAdam):
    """Apex counts steps by group, in ``group["step"]``; here every tensor's state counts too, as torch's does.

    A group without a count takes that of its first tensor, so that whoever sets the state removes the group's.
    """

    def step(self) -> None:
        states = [self.state[tensor] for group in self.param_groups for tensor in group["params"]]
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = int(self.state[group["params"][0]].get("step", 0))
        super().step()
        counts = [state["step"] for state in states if "step" in state]
        if counts:
            torch._foreach_add_(counts, 1)


def make_adamw(
    groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW over parameter groups, each with its weight decay."""
    return _CountingAdam(list(groups), lr=lr, betas=betas, eps=eps, adam_w_mode=True)
