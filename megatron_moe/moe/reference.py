"""The plain, obviously right mixture of experts: GShard's Algorithm 2 with dense one-hot tensors.

::

    combine_GTEC    weight of token t in slot c of expert e, one-hot over c
    dispatch_GTEC   1 where combine has an entry

    dispatched_EGCD = einsum("gtec,gtd->egcd", dispatch, x)          (an all-to-all, if e is sharded)
    outputs_EGCD    = expert e applied to dispatched[e]
    y_GTD           = einsum("gtec,egcd->gtd", combine, outputs)     (and back)

Memory is T times T for a dropless layer, which nobody can afford; the fast path must give the same numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_moe.moe.routing import Choice, multi_hot


def combine_tensor(choice: Choice, num_slots: int) -> tuple[Tensor, Tensor]:
    """Dense combine weights and dispatch mask, both [G, T, E, C].

    Slots of an expert are filled in the order of tokens. Which slot a token has makes no difference to the
    result.

    Args:
        num_slots: C; T is always enough. A copy beyond it is a mistake of the caller.
    """
    ids_GTK, num_experts = choice.expert_ids_GTK, choice.scores_GTE.shape[-1]
    kept_GTE = multi_hot(ids_GTK, num_experts)
    slots_GTE = kept_GTE.cumsum(dim=1) - 1
    assert int((slots_GTE * kept_GTE).max()) < max(num_slots, 1), "more copies than slots"
    weights_GTE = choice.weights_GTK.new_zeros(*ids_GTK.shape[:2], num_experts + 1)
    columns_GTK = torch.where(ids_GTK < 0, num_experts, ids_GTK)
    weights_GTE = weights_GTE.scatter_add(-1, columns_GTK, choice.weights_GTK)[..., :num_experts]
    slot_hot_GTEC = slots_GTE.unsqueeze(-1) == torch.arange(num_slots, device=ids_GTK.device)
    dispatch_GTEC = (slot_hot_GTEC & kept_GTE.bool().unsqueeze(-1)).to(weights_GTE.dtype)
    return weights_GTE.unsqueeze(-1) * dispatch_GTEC, dispatch_GTEC


def reference_moe(
    x_GTD: Tensor, choice: Choice, expert: Callable[[int, Tensor], Tensor], num_slots: int | None = None
) -> Tensor:
    """Dispatch, apply the experts, combine (arXiv 2006.16668, Algorithm 2).

    Args:
        expert: ``expert(e, rows)`` applies expert e to rows [..., D].
        num_slots: slots per expert and group. Default: T.

    Returns:
        y_GTD, zero for tokens without expert; the residual is added outside.
    """
    num_slots = x_GTD.shape[1] if num_slots is None else num_slots
    combine_GTEC, dispatch_GTEC = combine_tensor(choice, num_slots)
    dispatched_EGCD = torch.einsum("gtec,gtd->egcd", dispatch_GTEC.to(x_GTD.dtype), x_GTD)
    outputs_EGCD = torch.stack([expert(e, rows_GCD) for e, rows_GCD in enumerate(dispatched_EGCD)])
    return torch.einsum("gtec,egcd->gtd", combine_GTEC.to(outputs_EGCD.dtype), outputs_EGCD)
