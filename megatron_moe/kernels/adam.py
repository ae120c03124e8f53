"""The optimizer that updates flat tensors: torch's AdamW, fused where the device has it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class _AdamW:
    """What is used of ``torch.optim.AdamW``, over the function behind it.

    torch's class brings torch's compiler along: 150 MiB and seconds of every process that never compiles.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float], eps: float, lr: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.betas, self.eps = betas, eps
        # a dry run has no kernels
        self.fused = all(tensor.device.type != "meta" for group in groups for tensor in group["params"])

    @torch.no_grad()
    def step(self) -> None:
        """Update every tensor that has a gradient, in place."""
        for group in self.param_groups:
            tensors: list[Tensor] = [tensor for tensor in group["params"] if tensor.grad is not None]
            states = [self.state[tensor] for tensor in tensors]
            adamw(
                tensors,
                [tensor.grad for tensor in tensors if tensor.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=self.fused,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                maximize=False,
            )


def make_adamw(groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> _AdamW:
    """AdamW over parameter groups, each with its weight decay.

    The state of a parameter is ``step`` (a tensor []), ``exp_avg`` and ``exp_avg_sq``; whoever makes it sets it.
    """
    return _AdamW(groups, betas, eps, lr)
